"""Promises of every pair of stores about how a task ends, also of `eager`."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from machinery_py import (
    Ignore,
    Reject,
    Replace,
    Retry,
    RetryTaskLater,
    State,
    TaskFailed,
    TaskState,
    TimeLimitExceeded,
    Unsupported,
    chord,
    current_task,
    group,
)
from machinery_py.brokers.base import Delivery, Fate
from machinery_py.stores.base import Mark, Session, Settlement
from machinery_py.testing.conformance.abilities import need_revocations
from machinery_py.testing.conformance.application import App, waiting
from machinery_py.testing.conformance.queues import QueueConformance
from machinery_py.testing.conformance.tasks import TaskConformance
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.signatures import decode_signature

RUN_ONCE: list[dict[str, Any]] = [{"ack": "early"}, {"on_worker_lost": "fail"}]
SHOWN = [" ".join(option.values()) for option in RUN_ONCE]


class EndingConformance(TaskConformance):
    """Tasks that say how they are to be tried again."""

    def test_retry_counts_and_takes_new_arguments(self, app: App) -> None:
        @app.server.task(retries=2)
        def climb(step: int, *, by: int = 1) -> int:
            app.calls.append((step, by, current_task().attempt))
            raise Retry(delay=0.0, args=(step + by,), kwargs={"by": 2}) from OSError(f"at {step}")

        result = climb.send(0)
        with pytest.raises(TaskFailed, match="OSError: at 3"):
            result.get(timeout=HANG)
        assert app.calls == [(0, 1, 1), (1, 2, 2), (3, 2, 3)]
        assert result.get_state().attempt == 3

    def test_retry_with_wrong_arguments_fails_at_once(self, app: App) -> None:
        @app.server.task(retries=2)
        def climb(step: int) -> None:
            app.calls.append((step,))
            raise Retry(delay=0.0, args=("one", 2))

        with pytest.raises(TaskFailed, match="the retry that it asked for: climb"):
            climb.send(1).get(timeout=HANG)
        assert app.calls == [(1,)]

    def test_task_is_tried_until_it_works(self, app: App) -> None:
        @app.server.task(retries=None, backoff=[0.0], dont_retry_on=KeyError)
        def stubborn(tries: int, end: str) -> int:
            app.calls.append((end,))
            if current_task().attempt < tries:
                raise ValueError("not yet")
            if end == "missing":
                raise KeyError(end)
            return current_task().attempt

        assert stubborn.send(7, "ok").get(timeout=HANG) == 7
        with pytest.raises(TaskFailed, match="missing"):
            stubborn.send(3, "missing").get(timeout=HANG)
        with pytest.raises(TaskFailed, match="not yet"):
            stubborn.options(retries=1).send(7, "counted").get(timeout=HANG)
        found = [app.calls.count((end,)) for end in ("ok", "missing", "counted")]
        assert found == [7, 3, 2]

    def test_result_that_has_failed_is_new_after_a_retry(self, app: App) -> None:
        broken = [True]

        @app.server.task
        def fragile() -> int:
            if broken:
                raise ConnectionError("away")
            return 5

        result = fragile.send()
        with pytest.raises(TaskFailed, match="away"):
            result.get(timeout=HANG)
        assert result.get_state().state is State.FAILURE
        broken.clear()

        try:
            assert app.server.inspect.retry([result.uuid]) == [result.uuid]
        except Unsupported:
            pytest.skip("messages of failed tasks are not kept")
        wait_until(result.touch, what="the result of the retry")
        assert (result.get(timeout=HANG), result.get_state().state) == (5, State.SUCCESS)

    def test_postponed_task_fails_at_its_limit(self, app: App) -> None:
        @app.server.task
        def busy() -> None:
            app.calls.append(())
            raise RetryTaskLater("busy", 0.0, limit=2)

        with pytest.raises(TaskFailed, match="postponed 2 times"):
            busy.send().get(timeout=HANG)
        assert len(app.calls) == 3

    def test_rejected_message_goes_back_to_its_queue(self, app: App) -> None:
        @app.server.task(retries=1)
        def choosy() -> int:
            [state] = app.server.backend.get_states([current_task().uuid]).values()
            app.calls.append((state.state, state.error_type))
            if len(app.calls) == 1:
                raise Reject("not here", requeue=True)
            return current_task().attempt

        result = (choosy.signature() | app.add.partial(4)).catch(app.note.partial("told")).send()
        assert result.get(timeout=HANG) == 5
        app.wait_until_idle()
        assert len(app.calls) == 2
        assert app.calls[1] in (("RETRY", "Rejected"), ("RECEIVED", ""), ("STARTED", ""))
        assert app.server.inspect.dead() == []

    @pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
    def test_rejected_message_becomes_a_dead_letter(self, app: App, is_async: bool) -> None:
        def choose() -> int:
            app.calls.append(())
            if len(app.calls) == 1:
                raise Reject(ValueError("of no use"))
            return 7

        async def choose_async() -> int:
            return choose()

        task = app.server.task(retries=3, backoff=[0.0])(choose_async if is_async else choose)
        first: Any = task.signature()
        result = (first | app.note.partial("next")).catch(app.note.partial("told")).send()
        with pytest.raises(TaskFailed, match="rejected: ValueError: of no use"):
            result.get(timeout=HANG)
        state = result.steps[0].get_state()
        assert (state.state, state.error_type) == (State.FAILURE, "Rejected")
        assert not state.results
        told = app.wait_for("told")
        assert told == [("rejected: ValueError: of no use", "told")]
        assert len(app.calls) == 2  # the task, and who is told

        wait_until(app.server.inspect.dead, what="a dead letter")
        [letter] = app.server.inspect.dead()
        assert (letter.reason, letter.uuid) == ("rejected", state.task_uuid)
        app.server.inspect.replay_dead([letter.id])
        assert app.server.result(state.task_uuid).get(timeout=HANG) == 7
        wait_until(lambda: ("next", 7) in app.calls, what="the next step")
        assert app.server.inspect.dead() == []

    @pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
    def test_ignored_task_ends_without_a_result(self, app: App, is_async: bool) -> None:
        def drop() -> None:
            app.calls.append(("run",))
            raise Ignore("nobody wants it")

        async def drop_async() -> None:
            drop()

        options: dict[str, Any] = {"on_failure": "dead_letter", "retries": 3, "retry_on": Exception}
        task = app.server.task(**options)(drop_async if is_async else drop)
        first: Any = task.signature()
        result = (first | app.note.partial("next")).catch(app.note.partial("told")).send()
        with pytest.raises(TaskFailed, match="ignored: nobody wants it"):
            result.get(timeout=HANG)

        assert app.wait_for("told") == [("ignored: nobody wants it", "told")]
        state = result.steps[0].get_state()
        assert (state.state, state.error_type) == (State.FAILURE, "Ignored")
        assert not state.results
        assert app.calls.count(("run",)) == 1
        assert len(app.calls) == 2
        assert app.server.inspect.dead() == []

    @pytest.mark.parametrize("error", [Ignore, Reject])
    def test_chord_with_a_member_that_gives_up_ends(self, app: App, error: type[Exception]) -> None:
        def leave() -> int:
            raise error("gone")

        task = app.server.task(leave)
        members = group(task.signature(), app.add.signature(1, 2))
        strict = chord(members, app.add.partial(4)).send()
        tolerant = chord(members, app.add.partial(4), on_failure="skip").send()

        assert tolerant.get(timeout=HANG) == 7
        with pytest.raises(TaskFailed, match="gone"):
            strict.get(timeout=HANG)

    def test_failed_message_is_kept_as_a_dead_letter_if_wanted(self, app: App) -> None:
        @app.server.task(on_failure="dead_letter", retries=1, backoff=[0.0])
        def load(path: str) -> str:
            app.calls.append((path,))
            if app.calls.count((path,)) <= 2:
                raise ValueError(f"cannot read {path}")
            return path

        result = load.send("a.csv")
        with pytest.raises(TaskFailed, match="cannot read"):
            result.get(timeout=HANG)
        wait_until(app.server.inspect.dead, what="a dead letter")
        [letter] = app.server.inspect.dead()
        assert (letter.reason, letter.uuid) == ("failed", result.uuid)
        assert letter.error == "cannot read a.csv"

        app.server.backend.purge_state(result.uuid)  # as when results have expired
        assert app.server.inspect.replay_dead([letter.id]) == [result.uuid]
        assert app.server.result(result.uuid).get(timeout=HANG) == "a.csv"
        assert app.server.inspect.dead() == []

    def test_message_with_gos_flag_is_kept_as_a_dead_letter(self, app: App) -> None:
        signature = app.fail.signature("away").replace(stop_task_deletion_on_error=True)
        with pytest.raises(TaskFailed, match="away"):
            app.server.send_task(signature).get(timeout=HANG)
        wait_until(app.server.inspect.dead, what="a dead letter")
        assert [one.reason for one in app.server.inspect.dead()] == ["failed"]

    def test_result_of_one_call_can_be_ignored(self, app: App) -> None:
        assert app.echo.options(ignore_result=True).send("x").get(timeout=HANG) is None
        quiet = app.server.task("quiet", ignore_result=True)(_seven)
        assert quiet.options(ignore_result=False).send().get(timeout=HANG) == 7
        assert quiet.send().get(timeout=HANG) is None

    def test_early_task_is_retried_and_calls_back(self, app: App) -> None:
        @app.server.task(ack="early", retries=2, backoff=[0.0])
        def flaky() -> int:
            if current_task().attempt < 3:
                raise ValueError("not yet")
            return current_task().attempt

        result = (flaky.signature() | app.add.partial(4)).send()
        assert result.get(timeout=HANG) == 7


class LossConformance(QueueConformance):
    """Tasks that are not run again when their worker is lost, and time limits of one call."""

    def test_sending_starts_no_thread(self, idle: App) -> None:
        before = set(threading.enumerate())
        result = idle.add.send(1, 2)
        assert not result.is_finished()
        new = [one.name for one in set(threading.enumerate()) - before]
        # RabbitMQ's connection has one, and drivers may have theirs.
        ours = [name for name in new if name.startswith("machinery") and "amqp" not in name]
        assert ours == []

    def test_time_limit_of_one_call_wins(self, app: App) -> None:
        @app.server.task(time_limit=HANG, retries=3)
        def rest() -> None:
            try:
                wait_until(lambda: False, timeout=HANG)
            except TimeLimitExceeded:
                app.calls.append(("asked",))
                raise

        with pytest.raises(TaskFailed, match="time limit of 0.05 s"):
            rest.options(time_limit=0.05, retries=0).send().get(timeout=HANG)
        wait_until(lambda: app.calls == [("asked",)], what="the task was asked to stop")

    def test_early_task_is_started_before_its_call(self, app: App) -> None:
        async def look_async() -> str:
            return look()

        def look() -> str:
            [state] = app.server.backend.get_states([current_task().uuid]).values()
            return state.state

        for name, function in (("look", look), ("look_async", look_async)):
            task = app.server.task(name, ack="early")(function)
            result: Any = task.send()
            assert result.get(timeout=HANG) == State.STARTED
            assert result.get_state().state is State.SUCCESS

    @pytest.mark.parametrize("option", RUN_ONCE, ids=SHOWN)
    def test_begun_run_of_a_lost_worker_fails(self, idle: App, option: dict[str, Any]) -> None:
        hold = waiting(idle, **option)
        result = hold.signature("gate").catch(idle.note.partial("told")).send()
        give_back(idle, State.STARTED)

        with idle.running():
            with pytest.raises(TaskFailed, match="worker 'lost' was lost while it ran") as failed:
                result.get(timeout=HANG)
            told = idle.wait_for("told")

        assert failed.value.error_type == "WorkerLost"
        assert told == [(failed.value.error, "told")]
        assert len(idle.calls) == 1

    @pytest.mark.parametrize("option", RUN_ONCE, ids=SHOWN)
    def test_run_that_has_not_begun_goes_on_elsewhere(
        self, idle: App, option: dict[str, Any]
    ) -> None:
        hold = waiting(idle, **option)
        idle.gate("gate").set()
        result = hold.send("gate")
        give_back(idle, State.RECEIVED)

        with idle.running():
            assert result.get(timeout=HANG) == "gate"

    @pytest.mark.parametrize("option", RUN_ONCE, ids=SHOWN)
    def test_begun_task_fails_when_its_worker_ends(self, idle: App, option: dict[str, Any]) -> None:
        hold = waiting(idle, **option)
        with idle.running(shutdown_timeout=0.0, concurrency=1):
            result = hold.send("gate")
            queued = hold.send("later")
            idle.wait_for_state(result.uuid, State.STARTED)
            wait_until(lambda: idle.calls, what="the call")  # an early task is STARTED before it
        idle.gate("gate").set()

        with pytest.raises(TaskFailed, match="its worker ended before it did") as failed:
            result.get(timeout=0)
        assert failed.value.error_type == "WorkerLost"
        assert not queued.get_state().is_finished
        idle.gate("later").set()
        with idle.running():
            assert queued.get(timeout=HANG) == "later"
        assert idle.calls == [("hold", "gate"), ("hold", "later")]

    @pytest.mark.parametrize("seed", range(2))
    def test_fence_grows_whatever_becomes_of_a_task(self, idle: App, seed: int) -> None:
        """Through retries, returns, dead letters, replacements and crashes, in any order."""
        fences: list[int] = []
        steps: list[str] = []

        @idle.server.task(retries=100, backoff=[0.0], dont_retry_on=LookupError)
        def live() -> None:
            fences.append(current_task().fence)
            match steps.pop() if steps else "end":
                case "postpone":
                    raise RetryTaskLater("in a moment", 0.0)
                case "retry":
                    raise ValueError
                case "return":
                    raise Reject(requeue=True)
                case "reject":
                    raise Reject
                case "replace":
                    raise Replace(live.signature())
                case "fail":
                    raise LookupError

        inspect = idle.server.inspect
        result = live.send()
        chance = random.Random(seed)
        for returned in (["return"], []):
            give_back(idle, State.STARTED)
            before, count = len(fences), 6 + len(returned)
            steps[:] = [*returned, "postpone", "retry", "reject", "replace", "fail"]
            chance.shuffle(steps)
            steps.insert(0, "fail")  # the last one, which leaves the task to the next round
            with idle.running(concurrency=1):
                while steps:
                    idle.wait_for_state(result.uuid, State.FAILURE)
                    if not steps:
                        break
                    if result.get_state().error_type == "Rejected":
                        wait_until(inspect.dead, what="a dead letter")
                        inspect.replay_dead([inspect.dead()[0].id])
                    else:
                        inspect.retry([result.uuid])
                idle.wait_for_state(result.uuid, State.FAILURE)
                idle.wait_until_idle()
            assert len(fences) == before + count
            assert inspect.retry([result.uuid]) == [result.uuid]

        with idle.running():
            result.get(timeout=HANG)
        assert fences == sorted(set(fences))
        assert len(fences) == 14

    def test_lost_run_is_a_dead_letter_if_wanted(self, idle: App) -> None:
        hold = waiting(idle, ack="early", on_failure="dead_letter")
        result = hold.send("gate")
        give_back(idle, State.STARTED)

        with idle.running():
            wait_until(idle.server.inspect.dead, what="a dead letter")
            [letter] = idle.server.inspect.dead()
            assert letter.reason == "failed"
            idle.gate("gate").set()
            idle.server.inspect.replay_dead([letter.id])
            assert result.get(timeout=HANG) == "gate"

    @pytest.mark.parametrize("end", ["expired", "revoked"])
    def test_only_failures_of_the_task_are_dead_letters(self, idle: App, end: str) -> None:
        hold = waiting(idle, on_failure="dead_letter")
        result = hold.options(**({"expires": -1.0} if end == "expired" else {})).send("gate")
        if end == "revoked":
            need_revocations(idle.server.backend)
            result.revoke()

        with idle.running(), pytest.raises(TaskFailed, match=end):
            result.get(timeout=HANG)
        assert idle.server.inspect.dead() == []


def give_back(app: App, state: State) -> None:
    """Claim the one waiting task as the worker "lost", mark it like this, and give it back."""
    session = app.server.app.store.open_session([app.server.config.default_queue], worker="lost")
    [delivery] = _claimed(session)
    signature = decode_signature(delivery.body)
    marked = TaskState(
        task_uuid=signature.uuid,
        task_name=signature.name,
        state=state,
        worker="lost",
        created_at=app.server.now(),
    )
    session.settle((), [Mark(delivery=delivery, state=marked)])
    session.settle([Settlement(delivery=delivery, uuid=signature.uuid, fate=Fate.BACK)])
    session.close()


def _claimed(session: Session) -> list[Delivery]:
    found: list[Delivery] = []

    def claim() -> bool:
        found.extend(session.receive(1, 0.1))
        return bool(found)

    wait_until(claim, what="the message")
    return found


def _seven() -> int:
    return 7
