"""Events: what a program may react to."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest

from machinery_py import NoRetry, Signature, current_task
from machinery_py.brokers.base import Message
from machinery_py.clock import UTC
from machinery_py.events import (
    Event,
    EventBus,
    MessageDead,
    TaskEvent,
    TaskFailed,
    TaskReceived,
    TaskRejected,
    TaskRetried,
    TaskRevoked,
    TaskSent,
    TaskStarted,
    TaskSucceeded,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerOffline,
    WorkerOnline,
)
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.apps import Bench, bench

__all__ = ["bench"]


def sent(name: str = "add") -> TaskSent:
    return TaskSent(signature=Signature(name=name))


# The bus


def test_handler_gets_events_of_its_class_and_of_subclasses() -> None:
    bus, exact, base, everything = EventBus(), [], [], []  # type: ignore[var-annotated]
    bus.subscribe(TaskSent, exact.append)
    bus.subscribe(TaskEvent, base.append)
    bus.subscribe(Event, everything.append)

    events = [
        sent(),
        TaskStarted(signature=Signature(name="add"), worker="w"),
        WorkerOnline(worker="w"),
    ]
    for event in events:
        bus.emit(event)

    assert exact == events[:1]
    assert base == events[:2]
    assert everything == events


def test_subscription_can_be_ended_during_its_call() -> None:
    bus, calls = EventBus(), []

    def once(event: TaskSent) -> None:
        calls.append(event)
        end()

    end = bus.subscribe(TaskSent, once)
    bus.subscribe(TaskSent, calls.append)
    bus.emit(sent())
    bus.emit(sent())
    end()
    assert len(calls) == 3


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_failing_handler_is_logged_and_stops_no_other(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    bus, calls = EventBus(), []  # type: ignore[var-annotated]

    def broken(event: TaskSent) -> None:
        raise error("mine")

    bus.subscribe(TaskSent, broken)
    bus.subscribe(TaskSent, calls.append)
    bus.emit(sent())
    bus.emit(sent())
    assert len(calls) == 2
    assert "mine" in caplog.text


def test_event_bus_knows_which_events_are_subscribed() -> None:
    bus = EventBus()
    assert TaskSent not in bus.wanted
    end = bus.subscribe(TaskEvent, print)
    assert TaskSent in bus.wanted
    assert TaskEvent in bus.wanted
    assert WorkerOnline not in bus.wanted
    end()
    assert TaskSent not in bus.wanted


def test_subscriptions_of_two_threads_at_once_both_count() -> None:
    bus = EventBus()
    looked, go_on = threading.Event(), threading.Event()

    class Held(Event, frozen=True, kw_only=True):
        @classmethod
        def __subclasses__(cls) -> list[type[Event]]:
            if not looked.is_set():  # only the first look is slow
                looked.set()
                assert go_on.wait(HANG)
            return []

    first = threading.Thread(target=bus.subscribe, args=(Held, print))
    second = threading.Thread(target=bus.subscribe, args=(TaskSent, print))
    first.start()
    assert looked.wait(HANG)
    second.start()
    second.join(0.1)  # it waits for the first, or has ended
    go_on.set()
    first.join(HANG)
    second.join(HANG)

    assert {Held, TaskSent} <= bus.wanted


# What happens


def listen(bench: Bench, *kinds: type[Event]) -> list[Any]:
    events: list[Any] = []
    for kind in kinds:
        bench.server.events.subscribe(kind, events.append)
    return events


def test_tasks_and_callbacks_are_told_when_they_are_sent(bench: Bench) -> None:
    events = listen(bench, TaskSent)
    result = bench.add.signature(1, 2).then(bench.note.partial()).send()
    assert [(one.signature.name, one.signature.uuid) for one in events] == [("add", result.uuid)]
    bench.drain()
    assert [one.signature.name for one in events] == ["add", "note"]


def test_how_tasks_end_is_told(bench: Bench) -> None:
    @bench.server.task(retries=1, backoff=[5])
    def flaky() -> None:
        if current_task().attempt == 1:
            raise ConnectionError("away")

    @bench.server.task
    def hopeless() -> None:
        raise NoRetry("no")

    events = listen(bench, TaskSucceeded, TaskRetried, TaskFailed)
    flaky.send()
    hopeless.send()
    bench.drain()
    bench.harness.advance(seconds=5)
    bench.drain()

    retried, failed, succeeded = events
    assert (type(retried), retried.signature.name, retried.error) == (TaskRetried, "flaky", "away")
    assert retried.delay == pytest.approx(5)
    assert retried.error_type == "ConnectionError"
    assert 'raise ConnectionError("away")' in retried.traceback
    assert (type(failed), failed.error, failed.error_type) == (
        TaskFailed,
        "no",
        "machinery_py.errors.NoRetry",
    )
    assert (type(succeeded), succeeded.worker) == (TaskSucceeded, "harness")
    assert 0 < succeeded.runtime < HANG


def test_a_retry_is_told_before_the_next_run_starts(bench: Bench) -> None:
    @bench.server.task(retries=20, backoff=[0.0])
    def shaky() -> int:
        if current_task().attempt <= 20:
            raise ConnectionError("away")
        return current_task().attempt

    def slowly(event: TaskRetried) -> None:
        threading.Event().wait(0.002)
        events.append(event)

    events: list[object] = []
    bench.server.events.subscribe(TaskRetried, slowly)
    bench.server.events.subscribe(TaskStarted, events.append)
    with bench.server.new_worker(concurrency=2):
        assert shaky.send().get(timeout=HANG) == 21
    assert [type(event) for event in events] == [TaskStarted, TaskRetried] * 20 + [TaskStarted]


def test_dead_messages_are_told(bench: Bench) -> None:
    events = listen(bench, MessageDead)
    bench.server.broker.put(
        [Message(uuid="", name="", queue="machinery_tasks", body=b"{")], token=""
    )
    bench.drain()
    (event,) = events
    assert (event.queue, event.reason) == ("machinery_tasks", "undecodable")


def test_the_life_of_a_worker_is_told() -> None:
    bench = Bench()
    events = listen(bench, WorkerEvent, TaskStarted)
    with bench.server.new_worker("ada", 2):
        bench.add.send(1, 2).get(timeout=HANG)
        wait_until(lambda: any(type(one) is WorkerHeartbeat for one in events))
    kinds = [type(one) for one in events]
    assert kinds[0] is WorkerOnline
    assert kinds.count(WorkerOnline) == kinds.count(WorkerOffline) == kinds.count(TaskStarted) == 1
    assert kinds[-1] is WorkerOffline
    assert (events[-1].worker, events[-1].processed) == ("ada", 1)
    bench.server.close()


def test_revoked_task_is_told_by_whoever_ends_it(bench: Bench) -> None:
    events = listen(bench, TaskRevoked, TaskFailed)
    result = bench.add.send(1, 2)

    result.revoke()
    bench.drain()

    assert [(type(one), one.signature.uuid, one.worker) for one in events] == [
        (TaskRevoked, result.uuid, ""),
        (TaskFailed, result.uuid, ""),
    ]


def test_revoked_task_that_only_its_worker_can_end_is_told_by_it(bench: Bench) -> None:
    """L31."""
    events = listen(bench, TaskRevoked, TaskFailed, TaskRejected)
    uuid = bench.add.send(1, 2).uuid
    bench.server.backend.revoke([uuid])
    bench.drain()

    assert [(type(one), one.signature.uuid, one.worker) for one in events] == [
        (TaskRevoked, uuid, "harness"),
        (TaskFailed, uuid, "harness"),
    ]


def test_task_that_a_worker_does_not_run_is_told_as_rejected(bench: Bench) -> None:
    events = listen(bench, TaskRejected, TaskFailed, MessageDead)
    bench.server.send_task(Signature(name="unknown"))
    bench.add.options(expires=1.0).send(1, 2)
    bench.harness.advance(seconds=2)
    bench.fail.send("run, and failed")
    bench.drain()

    assert [(type(one), getattr(one, "reason", one.signature.name)) for one in events] == [
        (TaskRejected, "unregistered"),
        (TaskRejected, "Expired"),
        (TaskFailed, "add"),
        (TaskFailed, "fail"),
    ]
    assert "ValueError: run, and failed" in events[-1].traceback


def test_received_task_is_told_with_its_wait_before_it_starts() -> None:
    bench = Bench()
    events = listen(bench, TaskReceived, TaskStarted)
    late = dt.datetime.now(UTC) + dt.timedelta(seconds=0.05)
    with bench.server.new_worker("ada", 1):
        bench.add.signature(1, 2).replace(eta=late).send().get(timeout=HANG)
    bench.server.close()

    assert [type(one) for one in events] == [TaskReceived, TaskStarted]
    assert events[0].worker == "ada"
    assert 0 <= events[0].wait < HANG
