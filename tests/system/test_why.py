"""Why a task waits, on each store: every cause, as a person meets it."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from machinery_py import Config, ResultTimeout, Server, State, chain, current_task, group
from machinery_py.backends.base import Change
from machinery_py.tasks.reasons import CAUSES, Why
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.fixtures import url_of

STORES = ("memory", "sqlite", "redis", "mongodb", "postgresql", "amqp+redis")


class Scene:
    """A Server over real stores, with tasks that wait until they are let go."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.gate = threading.Event()
        self.add = server.task("add")(lambda a, b: a + b)
        self.hold = server.task("hold")(self._hold)
        self.fails = server.task("fails", retries=3, backoff=lambda attempt: 60.0)(_fails)
        self.rated = server.task("rated", rate="1/h", rate_key="who")(_who)
        self.one = server.task("one", max_running=1)(self._hold)
        self.alone = server.task("alone", exclusive="wait")(self._hold)

    def _hold(self) -> None:
        current_task().progress(1, 2)
        self.gate.wait(HANG)

    def causes(self, uuid: str) -> list[str]:
        return [one.cause for one in self.why(uuid).reasons]

    def why(self, uuid: str, **options: Any) -> Why:
        why = self.server.inspect.why(uuid, **options)
        assert CAUSES.issuperset(one.cause for one in why.reasons) and why.reasons
        assert why.uuid in str(why)
        return why

    def text(self, uuid: str, cause: str, **options: Any) -> str:
        """The text of this cause, which must be among the reasons."""
        why = self.why(uuid, **options)
        found = [one.text for one in why.reasons if one.cause == cause]
        assert found, why
        return found[0]

    def wait_for(self, uuid: str, cause: str) -> str:
        """Return the text of this cause once it is one: a task may be on its way meanwhile."""
        found: list[str] = []

        def is_found() -> bool:
            found[:] = [one.text for one in self.why(uuid).reasons if one.cause == cause]
            return bool(found)

        wait_until(is_found, HANG, what=f"{uuid}: {cause}")
        return found[0]


def _fails() -> None:
    raise ValueError("no luck")


def _who(who: str) -> str:
    return who


@pytest.fixture(params=STORES)
def scene(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Scene]:
    kinds = [*request.param.split("+"), ""]
    broker, backend = (
        url_of(kind, tmp_path / "tasks.db", request) if kind else "" for kind in kinds[:2]
    )
    config = Config(broker=broker, result_backend=backend, lock=backend, prefetch=4)
    with contextlib.closing(Server(config)) as server:
        scene = Scene(server)
        yield scene
        scene.gate.set()


def test_nobody_serves_the_queue(scene: Scene) -> None:
    result = scene.add.send(1, 2)
    why = result.why()

    (reason,) = [one for one in why.reasons if one.cause == "no worker"]
    assert reason.text == "no worker on 'machinery_tasks'"
    assert reason.hint.startswith("start one: machinery worker ")
    assert why.state is State.PENDING and why.seconds is not None
    with pytest.raises(ResultTimeout, match=r"last state PENDING, no worker on 'machinery_tasks'"):
        result.get(timeout=0)


def test_the_queue_is_paused(scene: Scene) -> None:
    if not scene.server.broker.features.pausing:
        pytest.skip("this broker pauses nothing")
    result = scene.add.send(1, 2)
    scene.server.inspect.pause("machinery_tasks")

    assert scene.text(result.uuid, "paused") == "'machinery_tasks' is paused"
    scene.server.inspect.resume("machinery_tasks")
    assert "paused" not in scene.causes(result.uuid)


def test_others_are_before_it(scene: Scene) -> None:
    results = [scene.add.send(number, 2) for number in range(3)]
    text = scene.text(results[2].uuid, "behind")

    if scene.server.broker.features.peeking:
        assert text == "2 are before it in 'machinery_tasks'"
        assert "add(2, 2)" in str(scene.why(results[2].uuid))
        assert scene.text(results[0].uuid, "behind") == "it is the next of 'machinery_tasks'"


def test_it_is_due_later(scene: Scene) -> None:
    result = scene.add.options(delay=3600).send(1, 2)

    assert scene.text(result.uuid, "delayed").startswith("it is due in ")


def test_it_is_tried_again_later(scene: Scene) -> None:
    with scene.server.new_worker("ada", 1):
        result = scene.fails.send()
        wait_until(lambda: result.get_state().state is State.RETRY, HANG, what="its retry")
        if _peeks(scene):
            text = scene.wait_for(result.uuid, "retried")
            assert text.startswith("it is tried again in ")
            assert text.endswith("try 1 failed, ValueError: no luck")
        else:
            scene.wait_for(result.uuid, "delayed")


def _peeks(scene: Scene) -> bool:
    return scene.server.broker.features.peeking


def test_a_rate_is_used_up(scene: Scene) -> None:
    with scene.server.new_worker("ada", 2):
        first, second = scene.rated.send("acme"), scene.rated.send("acme")
        first.get(HANG)
        if _peeks(scene):
            text = scene.wait_for(second.uuid, "limit")
            assert text.startswith("rate=1/h of key 'who=acme': 1 waits for it, the turn of")
        else:
            assert scene.why(second.uuid).reasons


def test_as_many_run_as_may(scene: Scene) -> None:
    with scene.server.new_worker("ada", 2):
        first, second = scene.one.send(), scene.one.send()
        wait_until(lambda: first.get_state().state is State.STARTED, HANG, what="the first runs")
        if _peeks(scene):
            text = scene.wait_for(second.uuid, "limit")
            assert text.startswith("max_running=1: 1 runs, 1 waits for it")
        scene.gate.set()
        second.get(HANG)


def test_another_holds_its_lock(scene: Scene) -> None:
    with scene.server.new_worker("ada", 2):
        first, second = scene.alone.send(), scene.alone.send()
        wait_until(lambda: first.get_state().state is State.STARTED, HANG, what="the first runs")
        if _peeks(scene):
            assert scene.wait_for(second.uuid, "lock").endswith("is held; 1 waits for it")
        scene.gate.set()
        second.get(HANG)


def test_it_is_revoked(scene: Scene) -> None:
    result = scene.add.options(delay=3600).send(1, 2)
    scene.server.backend.revoke([result.uuid])
    assert "revoked" in scene.causes(result.uuid)

    scene.server.revoke(result.uuid)
    assert scene.text(result.uuid, "ended").startswith("Revoked: ")


def test_it_has_expired(scene: Scene) -> None:
    if not _peeks(scene):
        pytest.skip("this broker shows no messages")
    result = scene.add.options(expires=0.001).send(1, 2)

    scene.wait_for(result.uuid, "expired")


def test_a_worker_has_taken_it_in_advance(scene: Scene) -> None:
    with scene.server.new_worker("ada", 1):
        running, held = scene.hold.send(), scene.hold.send()
        wait_until(lambda: running.get_state().state is State.STARTED, HANG, what="the first runs")
        scene.wait_for(running.uuid, "running")
        causes = scene.causes(held.uuid)
        assert {"held", "behind"} & set(causes)  # the worker holds little of what runs long
        if "held" in causes:
            assert "worker ada has taken it, and runs hold" in scene.text(held.uuid, "held")
        else:
            assert "its workers run hold" in scene.text(held.uuid, "behind")


def test_it_runs(scene: Scene) -> None:
    with scene.server.new_worker("ada", 1):
        result = scene.hold.send()
        wait_until(lambda: bool(result.get_state().progress), HANG, what="its progress is known")
        why = scene.why(result.uuid, stack=True)

    assert why.state is State.STARTED
    assert why.reasons[0].text == "worker ada runs it, 1 of 2 done"
    if scene.server.broker.features.topics:
        assert "gate.wait" in why.reasons[-1].text


def test_its_worker_is_gone(scene: Scene) -> None:
    result = scene.add.send(1, 2)
    state = msgspec.structs.replace(result.get_state(), state=State.STARTED, worker="ghost")
    scene.server.backend.apply([Change(key=result.uuid, states=(state,))])

    assert scene.text(result.uuid, "worker gone").startswith("worker ghost is gone")


def test_no_worker_knows_it(scene: Scene) -> None:
    config = scene.server.config
    stranger = Server(Config(broker=config.broker, result_backend=config.result_backend))
    with contextlib.closing(stranger):
        stranger.task("other")(_fails)
        with stranger.new_worker("bob", 1):
            result = scene.add.send(1, 2)
            if _peeks(scene):
                assert "'add'" in scene.wait_for(result.uuid, "unknown task")


def test_the_members_of_a_group_that_are_left_are_named(scene: Scene) -> None:
    result = group(scene.add.signature(1, 2), scene.hold.signature()).send()
    with scene.server.new_worker("ada", 2):
        done, held = result.results
        done.get(HANG)
        wait_until(lambda: held.get_state().state is State.STARTED, HANG, what="the other runs")
        of_group = scene.why(result.uuid)
        why = result.why()
        scene.gate.set()

    assert of_group.reasons[0].text == f"1 of its 2 tasks have not ended: {held.uuid} (STARTED)"
    assert (why.uuid, why.others, why.reasons[0].cause) == (held.uuid, 0, "running")


def test_a_step_before_it_is_what_a_chain_waits_for(scene: Scene) -> None:
    result = chain(scene.add.signature(1, 2), scene.add.partial(3), scene.add.partial(4)).send()

    assert result.why().uuid == result.steps[0].uuid
    assert result.steps[-1].why().uuid == result.steps[0].uuid


def test_it_has_ended(scene: Scene) -> None:
    failing = scene.server.task("breaks")(_fails)
    with scene.server.new_worker("ada", 1):
        good, bad = scene.add.send(1, 2), failing.send()
        good.get(HANG)
        wait_until(lambda: bad.get_state().is_finished, HANG, what="it has failed")

    assert scene.why(good.uuid).reasons[0].text == "it has its result"
    why = scene.why(bad.uuid)
    assert "has failed, " in str(why)
    assert why.reasons[0].text == "ValueError: no luck"
    assert why.reasons[0].hint.endswith(bad.uuid)


def test_a_broker_that_is_away_is_said() -> None:
    config = Config(broker="redis://127.0.0.1:1", result_backend="memory://", publish_timeout=0.2)
    with contextlib.closing(Server(config)) as server:
        add = server.task("add")(lambda a, b: a + b)
        signature = add.signature(1, 2).with_uuid()
        server.backend.set_state_pending(signature)
        why = server.inspect.why(signature.uuid)

    assert {one.cause for one in why.reasons} >= {"store away"}
    assert not {"no worker", "worker gone"} & {one.cause for one in why.reasons}


def test_a_text_says_how_long() -> None:
    why = Why(uuid="u", name="f()", seconds=dt.timedelta(minutes=4).total_seconds(), others=2)

    assert str(why) == "u f() waits for 4 min (and 2 more):"
