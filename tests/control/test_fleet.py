"""The state of a fleet, from its events."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec
import pytest

from machinery_py import Signature
from machinery_py.clock import UTC
from machinery_py.control import fleet
from machinery_py.control.fleet import OTHERS, FleetState
from machinery_py.events import (
    Event,
    TaskFailed,
    TaskReceived,
    TaskRejected,
    TaskRetried,
    TaskRevoked,
    TaskSent,
    TaskStarted,
    TaskSucceeded,
    WorkerHeartbeat,
    WorkerOffline,
    WorkerOnline,
)
from machinery_py.testing.clocks import ManualClock

EPOCH = dt.datetime(2026, 1, 1, tzinfo=UTC)


class Told:
    """A FleetState and its clock."""

    def __init__(self) -> None:
        self.clock = ManualClock(EPOCH)
        self.state = FleetState(self.clock.monotonic)

    def tell(self, *events: Event) -> None:
        self.state.apply(msgspec.structs.replace(one, at=EPOCH, host="h", pid=1) for one in events)

    def alive(self) -> list[str]:
        return [one.name for one in self.state.alive()]


@pytest.fixture
def told() -> Told:
    return Told()


def call(name: str, uuid: str = "u", queue: str = "q") -> Signature[Any]:
    return Signature(name=name, uuid=uuid, routing_key=queue)


def test_worker_is_alive_until_three_heartbeats_are_missed(told: Told) -> None:
    """T46: killed; one that ends in good order is known at once, whatever its host's clock."""
    beat = WorkerHeartbeat(worker="a", interval=2.5, active=1, processed=7, load=(1, 2, 3))
    told.tell(WorkerOnline(worker="a"), WorkerOnline(worker="b"), beat)
    assert told.alive() == ["a", "b"]
    seen = told.state.workers["a"]
    assert (seen.host, seen.active, seen.processed, seen.load) == ("h", 1, 7, (1, 2, 3))

    told.tell(WorkerOffline(worker="b", processed=3))
    assert told.alive() == ["a"]
    assert told.state.workers["b"].processed == 3

    told.clock.advance(7.4)
    assert told.alive() == ["a"]
    told.clock.advance(0.2)
    assert told.alive() == []
    told.tell(beat)
    assert told.alive() == ["a"]


def test_worker_that_is_silent_for_long_is_forgotten(told: Told) -> None:
    told.tell(WorkerOnline(worker="a"), WorkerOnline(worker="b"))
    told.tell(TaskStarted(signature=call("one"), worker="a"))
    told.clock.advance(fleet.FORGOTTEN - 1)
    told.tell(WorkerHeartbeat(worker="b"))
    told.clock.advance(2)
    assert list(told.state.workers) == ["a", "b"]

    told.tell(WorkerHeartbeat(worker="b"))
    assert list(told.state.workers) == ["b"]
    assert told.state.running == {}


def test_events_of_tasks_are_counted_by_task_and_by_queue(told: Told) -> None:
    one, other = call("one"), call("other", "v", "p")
    told.tell(
        TaskSent(signature=one),
        TaskReceived(signature=one, worker="w"),
        TaskRetried(signature=one, worker="w", error="e", delay=1.0),
        TaskSucceeded(signature=one, worker="w", runtime=2.0),
        TaskSucceeded(signature=one, worker="w", runtime=4.0),
        TaskRejected(signature=other, worker="w", reason="Expired"),
        TaskRevoked(signature=other, worker="w"),
        TaskFailed(signature=other, worker="w", error="no", error_type="E"),
    )

    tally, others = told.state.tasks["one"], told.state.queues["p"]
    assert (tally.sent, tally.received, tally.retried, tally.succeeded) == (1, 1, 1, 2)
    assert (tally.mean, tally.longest) == (3.0, 4.0)
    assert (others.rejected, others.revoked, others.failed, others.mean) == (1, 1, 1, 0.0)
    assert told.state.queues["q"] == tally
    assert [one.error for one in told.state.failures] == ["no"]
    assert [one.runtime for one in told.state.slowest] == [4.0, 2.0]


def test_rate_is_that_of_the_last_minute(told: Told) -> None:
    ended = TaskSucceeded(signature=call("one"), worker="w", runtime=0.1)
    for _ in range(30):
        told.tell(ended, ended)
        told.clock.advance(1.0)
    tally = told.state.tasks["one"]
    assert told.state.rate(tally) == pytest.approx(2.0)
    told.clock.advance(45.0)
    assert told.state.rate(tally) == pytest.approx(0.5, abs=0.05)
    told.clock.advance(60.0)
    assert told.state.rate(tally) == 0.0


@pytest.mark.parametrize(
    "end",
    [
        TaskSucceeded(signature=call("one"), worker="w", runtime=1.0),
        TaskRetried(signature=call("one"), worker="w", error="e", delay=1.0),
        TaskFailed(signature=call("one"), worker="w", error="e", error_type="E"),
        WorkerOffline(worker="w"),
        WorkerOnline(worker="w"),
        WorkerHeartbeat(worker="w", active=0),
    ],
)
def test_run_is_listed_until_its_end_or_that_of_its_worker(told: Told, end: Event) -> None:
    told.tell(TaskStarted(signature=call("one"), worker="w"))
    told.tell(WorkerHeartbeat(worker="w", active=1), WorkerHeartbeat(worker="v", active=0))
    told.tell(TaskFailed(signature=call("one"), worker="v", error="e", error_type="late"))
    assert [one.name for one in told.state.running.values()] == ["one"]

    told.tell(end)

    assert told.state.running == {}


def test_state_stays_small_whatever_is_told(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_NAMES", "MAX_WORKERS", "MAX_RUNNING"):
        monkeypatch.setattr(fleet, name, 3)
    for number in range(20):
        signature = call(f"task {number}", f"u{number}", f"queue {number}")
        told.tell(
            WorkerOnline(worker=f"w{number}"),
            TaskStarted(signature=signature, worker="w"),
            TaskSucceeded(signature=signature, worker="v", runtime=number),
            TaskFailed(signature=signature, worker="v", error="e", error_type="E"),
        )

    state = told.state
    assert (len(state.workers), len(state.running)) == (3, 3)
    assert [*state.tasks] == ["task 0", "task 1", "task 2", OTHERS]
    assert state.tasks[OTHERS].succeeded == state.queues[OTHERS].failed == 17
    assert [one.runtime for one in state.slowest] == list(range(19, 9, -1))
    assert len(state.failures) == fleet.SHOWN
