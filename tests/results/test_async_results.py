"""What a sender gets back."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from machinery_py import (
    AsyncResult,
    ChainResult,
    ResultExpired,
    ResultTimeout,
    State,
    StateNotFound,
    TaskFailed,
    chain,
    chord,
    group,
)
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.rows import RowsListener
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.results import workflow_results
from machinery_py.results.async_results import Waitable
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.rows import RowsStore
from machinery_py.tasks.states import TaskState
from machinery_py.testing.waiting import HANG, together
from tests.support.apps import Bench, bench

__all__ = ["bench"]


# One task


def test_a_result_is_there_when_the_task_has_run(bench: Bench) -> None:
    result = bench.add.send(1, 2)
    assert (result.touch(), result.is_finished(), result.get_state().state) == (
        None,
        False,
        State.PENDING,
    )
    bench.drain()
    assert (result.touch(), result.is_finished(), result.get_state().state) == (
        3,
        True,
        State.SUCCESS,
    )
    assert result.get(timeout=0) == result.get() == 3


def test_what_is_over_is_there_at_once_the_second_time(bench: Bench) -> None:
    result = group(bench.add.signature(1, 2), bench.add.signature(3, 4)).send()
    bench.drain()

    assert [result.get(timeout=HANG), result.get(timeout=0)] == [[3, 7], [3, 7]]


@pytest.mark.parametrize("shape", ["group", "skipping group", "chain", "chord", "step"])
def test_result_that_has_failed_is_new_after_a_retry(bench: Bench, shape: str) -> None:
    broken = [True]

    @bench.server.task
    def fragile(value: int) -> int:
        if broken:
            raise ConnectionError("away")
        return value

    one, add = fragile.signature(5), bench.add.signature(1, 2)
    result: Any = {
        "group": lambda: group(one, add).send(),
        "skipping group": lambda: group(one, add).replace(on_failure="skip").send(),
        "chain": lambda: chain(one, bench.add.partial(1)).send(),
        "chord": lambda: chord(group(add, one), bench.note.partial("all")).send(),
        "step": lambda: chain(one, bench.add.partial(1)).send().steps[1],
    }[shape]()
    bench.drain()
    bench.drain()
    if shape == "skipping group":
        assert (result.get(timeout=0), result.progress()) == ([3], (2, 2))
    else:
        for look in (result.touch, lambda: result.get(timeout=0)):
            with pytest.raises(TaskFailed):
                look()
        assert result.is_finished()
    broken.clear()

    retried = bench.server.inspect.retry()
    if shape != "chord":
        assert not result.is_finished()
    bench.drain()
    bench.drain()

    assert retried
    if shape == "chord":
        assert result.group.get(timeout=0) == [3, 5]
    else:
        expected = {"group": [5, 3], "skipping group": [5, 3], "chain": 6, "step": 6}
        assert result.get(timeout=0) == expected[shape]


def test_a_failure_is_raised_each_time(bench: Bench) -> None:
    result = bench.fail.send("boom")
    bench.drain()
    for _ in range(2):
        with pytest.raises(
            TaskFailed, match=rf"^task fail {result.uuid} failed: ValueError: boom$"
        ):
            result.get()
        with pytest.raises(TaskFailed):
            result.touch()
    assert result.is_finished()
    assert result.get_state().error == "boom"


def test_timeout_error_names_the_awaited_condition(bench: Bench) -> None:
    result = bench.add.options(queue="mail").send(1, 2)
    text = (
        rf"^no result of {result.uuid} after 0\.0 s; "
        r"last state PENDING, no worker on (queue )?'mail'$"
    )
    with pytest.raises(TimeoutError, match=text) as caught:
        result.get(timeout=0)
    assert isinstance(caught.value, ResultTimeout)


def test_a_timeout_has_no_hint_where_a_worker_serves_the_queue(bench: Bench) -> None:
    result = bench.add.send(1, 2)
    session = bench.server.app.store.open_session(["machinery_tasks"], worker="busy")
    with pytest.raises(ResultTimeout, match=r"last state PENDING, it is the next of"):
        result.get(timeout=0)
    session.close()


def test_a_timeout_says_that_the_queue_is_paused(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    result = bench.add.options(queue="mail").send(1, 2)
    bench.server.inspect.pause("mail")
    bench.drain()
    with (
        caplog.at_level(logging.WARNING, "machinery_py"),
        pytest.raises(ResultTimeout, match=r"PENDING, 'mail' is paused$"),
    ):
        result.get(timeout=2.2)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("'mail' is paused (resume it: machinery resume ")
    bench.server.inspect.resume("mail")
    bench.drain()
    assert result.get(timeout=0) == 3


def test_long_wait_without_workers_is_warned_of_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    result = bench.add.send(1, 2)
    with caplog.at_level(logging.WARNING, "machinery_py"), pytest.raises(ResultTimeout):
        result.get(timeout=2.2)
    texts = [record.getMessage() for record in caplog.records]
    assert [
        text
        for text in texts
        if text.startswith("no worker on queue 'machinery_tasks' (start one: ")
    ] == texts
    assert len(texts) == 1


def test_a_result_that_was_never_there_is_expired(bench: Bench) -> None:
    result = bench.server.result("task_unheard-of")
    for call in (result.get, result.touch):
        with pytest.raises(
            ResultExpired,
            match=r"no state of task_unheard-of: it expired \(results are kept 3600 s",
        ):
            call()
    assert result.is_finished()
    with pytest.raises(StateNotFound):
        result.get_state()


def test_a_result_that_was_seen_is_kept_and_others_expire(bench: Bench) -> None:
    seen, unseen = bench.add.send(1, 2), bench.add.send(3, 4)
    bench.drain()
    assert seen.get(timeout=0) == 3
    bench.harness.advance(seconds=3601)
    assert seen.get(timeout=0) == 3
    with pytest.raises(ResultExpired):
        unseen.get(timeout=0)


@pytest.mark.parametrize("end", ["done", "expired", "revoked", "retry revoked", "chord broken"])
@pytest.mark.parametrize("said_by", ["call", "task"])
def test_end_is_kept_as_long_as_its_call_says(bench: Bench, end: str, said_by: str) -> None:
    found: dict[str, AsyncResult[int]] = {}
    for name, life in (("brief", dt.timedelta(seconds=10)), ("long", dt.timedelta(hours=2))):
        of_task = life if said_by == "task" else None
        task = bench.server.task(name, retries=1, result_expires=of_task)(_first_of)
        if said_by == "call":
            task = task.options(result_expires=life)
        if end == "chord broken":
            found[name] = chord([bench.fail.signature("no")], task.partial()).send().callback
        else:
            task = task.options(expires=-1.0) if end == "expired" else task
            found[name] = task.send([] if end == "retry revoked" else [1])
    if end != "revoked":
        bench.drain()
    if end.endswith("revoked"):
        for result in found.values():
            result.revoke()
    assert {result.get_state().is_finished for result in found.values()} == {True}

    bench.harness.advance(seconds=11)
    with pytest.raises(StateNotFound):
        found["brief"].get_state()
    bench.harness.advance(hours=1)
    assert found["long"].get_state().is_finished


def _first_of(numbers: list[int]) -> int:
    return numbers[0]


def test_a_waiting_task_does_not_expire(bench: Bench) -> None:
    result = bench.add.options(delay=7200).send(1, 2)
    bench.harness.advance(hours=2)
    assert result.get_state().state is State.PENDING
    bench.drain()
    assert result.get(timeout=0) == 3


def test_a_waiter_is_woken(bench: Bench) -> None:
    results = [bench.add.send(i, i) for i in range(8)]

    def wait(index: int) -> int:
        return results[index].get(timeout=HANG) if index < 8 else bench.drain()

    assert together(9, wait) == [*(2 * i for i in range(8)), 8]


# Groups


def test_a_group_result_counts(bench: Bench) -> None:
    result = bench.server.send_group(group(bench.add.signature(i, i) for i in range(3)))
    assert result.touch() is None
    with pytest.raises(
        ResultTimeout, match=r"no result of group_\S+ after 0.0 s; last state 0 of 3 finished"
    ):
        result.get(timeout=0)
    bench.drain()
    assert result.get(timeout=0) == [0, 2, 4]
    assert (len(result), result[1].get(timeout=0)) == (3, 2)
    assert [type(one) for one in result] == [AsyncResult] * 3


def test_members_that_expired_are_told(bench: Bench) -> None:
    result = bench.server.send_group(group(bench.add.signature(1, 1), bench.add.signature(2, 2)))
    bench.drain()
    bench.harness.advance(hours=2)
    with pytest.raises(ResultExpired):
        result.get(timeout=0)


def test_revoking_a_group_revokes_its_members(bench: Bench) -> None:
    result = bench.server.send_group(group(bench.note.signature(i) for i in range(3)))
    result.revoke()
    bench.drain()
    assert bench.calls == []
    with pytest.raises(TaskFailed, match="revoked"):
        result.get(timeout=0)


# Chains and chords


def test_a_chain_is_waited_for_step_by_step(bench: Bench) -> None:
    result = bench.server.send_chain(
        chain(bench.add.signature(1, 1), bench.add.partial(1), bench.note.partial("last"))
    )
    assert type(result) is ChainResult
    assert len(result.steps) == 3
    text = rf"no result of {result.uuid} \(step 1 of 3: {result.steps[0].uuid}\) after 0\.0 s"
    with pytest.raises(ResultTimeout, match=text):
        result.get(timeout=0)
    bench.drain()
    result.get(timeout=0)
    assert [step.get(timeout=0) for step in result.steps] == [2, 3, None]


def test_chain_raises_the_error_of_its_failed_step(bench: Bench) -> None:
    result = bench.server.send_chain(
        chain(bench.fail.signature("first"), bench.note.partial(), bench.note.partial())
    )
    bench.drain()
    for _ in range(2):
        with pytest.raises(TaskFailed, match="first"):
            result.get(timeout=0)
    for step in result.steps:
        assert step.is_finished()
        with pytest.raises(TaskFailed, match="first"):
            step.get(timeout=0)


def test_a_step_can_be_waited_for_before_its_turn(bench: Bench) -> None:
    result = bench.server.send_chain(
        chain(bench.add.signature(1, 1), bench.add.partial(1), bench.add.partial(1))
    )
    last = result.steps[-1]
    assert (last.touch(), last.is_finished()) == (None, False)
    with pytest.raises(ResultTimeout):
        last.get(timeout=0)
    bench.drain()
    assert [step.get(timeout=0) for step in reversed(result.steps)] == [4, 3, 2]
    bench.server.backend.purge_state(last.uuid)
    with pytest.raises(ResultExpired):
        bench.server.result(last.uuid).get(timeout=0)


def test_a_chords_callback_can_be_waited_for_before_its_turn(bench: Bench) -> None:
    for member, error in (
        (bench.add.signature(1, 1), ""),
        (bench.fail.signature("member"), "member"),
    ):
        result = (group(member, bench.add.signature(2, 2)) | bench.add.partial()).send()
        assert (result.callback.touch(), result.callback.is_finished()) == (None, False)
        bench.drain()
        if error:
            with pytest.raises(TaskFailed, match=error):
                result.callback.get(timeout=0)
        else:
            assert result.callback.get(timeout=0) == 6


def test_chord_has_no_result_before_its_callback(bench: Bench) -> None:
    result = chord(group(bench.add.signature(1, 1)), bench.add.partial(1)).send()
    assert (result.touch(), result.is_finished()) == (None, False)


def test_chain_has_its_result_when_its_first_steps_expired(bench: Bench) -> None:
    last = bench.add.partial(1).replace(eta=bench.server.now().replace(microsecond=0))
    result = bench.server.send_chain(chain(bench.add.signature(1, 1), last))
    bench.drain()
    bench.server.backend.purge_state(result.steps[0].uuid)
    assert result.get(timeout=0) == 3


def test_a_chain_that_is_unknown_is_expired(bench: Bench) -> None:
    result = bench.server.send_chain(chain(bench.add.signature(1, 1), bench.add.partial(1)))
    for step in result.steps:
        bench.server.backend.purge_state(step.uuid)
    with pytest.raises(ResultExpired):
        result.get(timeout=0)


def test_group_in_a_chain_is_pending_before_it_is_reached(bench: Bench) -> None:
    later = bench.add.signature(1, 1).replace(eta=bench.server.now().replace(year=2090))
    result = bench.server.send_chain(
        later | group(bench.add.partial(1), bench.add.partial(2)) | bench.add.partial()
    )
    assert result.touch() is None
    assert not result.is_finished()
    with pytest.raises(ResultTimeout):
        result.get(timeout=0)


def test_unreached_last_step_of_a_chain_member_is_not_missing(bench: Bench) -> None:
    later = bench.add.signature(1, 1).replace(eta=bench.server.now().replace(year=2090))
    result = bench.server.send_group(group(later | bench.add.partial(1), bench.add.signature(2, 2)))
    bench.drain()
    assert result.touch() is None
    assert not result.is_finished()


def test_a_broken_head_of_a_member_breaks_the_group(bench: Bench) -> None:
    member = bench.fail.signature("head") | bench.add.partial(1)
    result = bench.server.send_group(group(member, bench.add.signature(2, 2)))
    bench.drain()
    with pytest.raises(TaskFailed, match="head") as raised:
        result.get(timeout=0)
    assert raised.value.error_type == "ValueError"


def test_failure_in_a_large_group_is_found_behind_an_open_member(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow_results, "LOOK", 2)
    later = bench.add.signature(1, 1).replace(eta=bench.server.now().replace(year=2090))
    members = [later, *(bench.add.signature(n, n) for n in range(6)), bench.fail.signature("x")]
    result = bench.server.send_group(group(members))
    in_chord = bench.server.send_chord(chord(group(members), bench.add.partial()))
    bench.drain()

    looks = [result.is_finished() for _ in range(5)]
    with pytest.raises(TaskFailed, match="x"):
        result.get(timeout=0)
    with pytest.raises(TaskFailed) as raised:
        in_chord.get(timeout=0)  # at once: its callback has failed

    assert looks[0] is False
    assert looks[-1] is True
    assert raised.value.error_type == "ValueError"


def test_large_group_has_its_results_at_the_first_look(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow_results, "LOOK", 2)
    result = bench.server.send_group(group(bench.add.signature(n, n) for n in range(7)))
    bench.drain()

    assert result.get(timeout=0) == [2 * n for n in range(7)]


class _Watched(MemoryBackend):
    """A backend whose listeners never sleep: instead, time passes and what is due is run.

    Whoever sleeps must watch what he looks at, or the end of it does not wake him.
    """

    bench: Bench
    result: Waitable[Any]

    def listener(self) -> RowsListener:
        return _WatchedListener(self)


class _Telling(_Watched):
    """A backend whose listeners bring the state of what has ended along."""

    reads = 0

    def listener(self) -> RowsListener:
        return _TellingListener(self)

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        self.reads += 1
        return super().get_states(uuids)


class _NotedListener(RowsListener):
    """Notes what is watched."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend.rows.listen())
        self._backend = backend
        self._watched: set[str] = set()

    def watch(self, uuids: Iterable[str]) -> None:
        self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        self._watched.difference_update(uuids)


class _WatchedListener(_NotedListener):
    def wait(self, timeout: float) -> None:
        backend = self._backend
        assert isinstance(backend, _Watched)
        assert set(backend.result._awaited()) <= self._watched, (
            "asleep, and not watching the step that comes next"
        )
        backend.bench.harness.advance(seconds=10)
        backend.bench.drain()


class _TellingListener(_NotedListener):
    def wait(self, timeout: float) -> None:
        backend = self._backend
        assert isinstance(backend, _Telling)
        backend.bench.drain()
        backend.reads = 0

    def told(self) -> Sequence[TaskState]:
        return [*MemoryBackend.get_states(self._backend, [*self._watched]).values()]


def test_state_that_came_with_the_news_is_not_read(bench: Bench) -> None:
    hub = MemoryRows(bench.server.app.clock)
    backend = _Telling(hub)
    bench.server.app.stores.store = RowsStore(MemoryBroker(hub), backend)
    result = bench.add.send(1, 2)
    backend.bench = bench

    assert result.get(timeout=HANG) == 3
    assert (result.get_state().state, backend.reads) == (State.SUCCESS, 0)


def test_waiter_for_a_chain_watches_its_last_step(bench: Bench) -> None:
    hub = MemoryRows(bench.harness.clock)
    backend = _Watched(hub)
    bench.server.app.stores.store = RowsStore(MemoryBroker(hub), backend)
    later = bench.server.now() + dt.timedelta(seconds=15)
    steps = chain(
        bench.add.signature(1, 1), bench.add.partial(1).replace(eta=later), bench.add.partial(1)
    )
    result = bench.server.send_chain(steps)
    backend.bench, backend.result = bench, result

    assert list(result._awaited()) == [result.uuid]
    assert result.get(timeout=HANG) == 4
