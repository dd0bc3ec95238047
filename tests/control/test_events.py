"""Events of a fleet over the memory store: publisher, stream, camera."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from machinery_py import Config, Context, Server, Signature
from machinery_py.brokers.base import Broker
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.rows_topics import RowsSubscription
from machinery_py.brokers.topics import Subscription
from machinery_py.clock import SYSTEM_CLOCK, UTC, Clock
from machinery_py.control import publisher
from machinery_py.control import stream as stream_module
from machinery_py.control.fleet import FleetState
from machinery_py.control.lamport import LamportClock
from machinery_py.control.publisher import EventPublisher
from machinery_py.control.records import EVENTS, clock_of, event_of, line_of, packed
from machinery_py.control.stream import EventStream, ServerEvents
from machinery_py.errors import BrokerUnavailable, Unsupported
from machinery_py.events import (
    Event,
    EventBus,
    TaskEnded,
    TaskEvent,
    TaskFailed,
    TaskRejected,
    TaskSent,
    TaskSucceeded,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerOffline,
    WorkerOnline,
)
from machinery_py.rows.memory import MemoryRows
from machinery_py.testing.waiting import HANG, together, wait_until
from machinery_py.version import __version__

LONG = 3600.0


class Fleet:
    """Applications that share one memory store, as processes share a server."""

    def __init__(self) -> None:
        self.servers: list[Server] = []

    def server(self, *, events: bool = True, clock: Clock | None = None) -> Server:
        given = {} if clock is None else {"clock": clock}
        server = Server(Config(broker="memory://", events=events, lease=1.0), **given)  # type: ignore[arg-type]
        if self.servers:
            server.app.swap(server.config, server.clock, self.servers[0].app.stores)
        self.servers.append(server)
        return server

    def close(self) -> None:
        for server in reversed(self.servers):
            server.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def until(stream: EventStream[Any], last: type[Event]) -> list[Any]:
    """Return the events up to the first one of that kind."""
    found: list[Any] = []
    wait_until(
        lambda: found.extend(stream.read(1.0)) or any(type(one.event) is last for one in found)
    )
    return found


def kinds(events: list[Any]) -> list[str]:
    return [one.kind for one in events if not isinstance(one.event, WorkerHeartbeat)]


def add(a: int, b: int) -> int:
    return a + b


def test_stream_tells_what_happens_in_other_processes(fleet: Fleet) -> None:
    """L17, L19, T39, T41, T43: who, where and when, in one order."""
    seen, sender, runner = fleet.server(events=False), fleet.server(), fleet.server()
    runner.register_task("add", add)

    with seen.events.stream() as stream:
        with runner.new_worker("ada", 2):
            uuid = sender.send_task(Signature.of("add", 20, 22)).uuid
            sender.app.publisher.close()
            found = until(stream, TaskSucceeded)
        found += until(stream, WorkerOffline)
        assert stream.missed == 0

    of_task = [one for one in found if isinstance(one.event, TaskEvent)]
    assert kinds(found)[0] in ("WorkerOnline", "TaskSent")
    assert kinds(sorted(of_task, key=lambda one: one.stamp)) == [
        "TaskSent",
        "TaskReceived",
        "TaskStarted",
        "TaskSucceeded",
    ]
    assert kinds(found).count("WorkerOnline") == kinds(found).count("WorkerOffline") == 1
    assert kinds(found)[-1] == "WorkerOffline"
    by_kind = {one.kind: one for one in found}
    ended = by_kind["TaskSucceeded"]
    assert (ended.uuid, ended.name, ended.attempt) == (uuid, "add", 1)
    assert (ended.queue, ended.worker, ended.pid) == (
        "machinery_tasks",
        "ada",
        os.getpid(),
    )
    assert ended.signature.routing_key == ended.queue
    assert (ended.result, 0 < ended.runtime < HANG) == ("42", True)
    assert 0 <= by_kind["TaskReceived"].wait < HANG
    assert abs(ended.at - dt.datetime.now(UTC)) < dt.timedelta(seconds=HANG)
    assert by_kind["WorkerOffline"].processed == 1
    assert ended.event is ended


def test_events_of_ends_have_the_notes_of_the_task(fleet: Fleet) -> None:
    runner = fleet.server()

    @runner.task(retries=1, backoff=[0.0])
    def sync(ctx: Context) -> None:
        ctx.note(step=ctx.attempt, of=["a", "b"])
        raise ConnectionError("refused")

    with runner.events.stream(TaskEvent) as stream, runner.new_worker("ada", 1):
        sync.send()
        found = until(stream, TaskFailed)

    assert {one.kind: one.notes for one in found if isinstance(one, TaskEnded)} == {
        "TaskRetried": {"step": 1, "of": ["a", "b"]},
        "TaskFailed": {"step": 2, "of": ["a", "b"]},
    }
    assert all("notes" not in one.as_json() for one in found if not isinstance(one, TaskEnded))


class Skewed:
    """A machine's clock that is wrong by so many hours."""

    def __init__(self, hours: float) -> None:
        self._wrong = dt.timedelta(hours=hours)

    def now(self) -> dt.datetime:
        return SYSTEM_CLOCK.now() + self._wrong

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic()


def test_cause_comes_before_effect_whatever_the_clocks_of_hosts_say(fleet: Fleet) -> None:
    """L01, L06, L07, L16: the task of a worker one hour ahead sends one to a worker behind."""
    ahead, behind = fleet.server(clock=Skewed(1)), fleet.server(clock=Skewed(-1))
    second = behind.register_task("second", add).signature(1, 2).replace(routing_key="behind")
    first = ahead.register_task("first", lambda: None)

    @ahead.around_task
    def send_second(signature: Signature[object]) -> Iterator[None]:
        ahead.send_task(second)
        yield

    with (
        fleet.server(events=False).events.stream(TaskEvent) as stream,
        ahead.new_worker("ahead", 1),
        behind.new_worker("behind", 1, queues=["behind"]),
    ):
        first.send()
        found = until(stream, TaskSucceeded)
        while not {("first", "TaskSucceeded"), ("second", "TaskSucceeded")} <= {
            (one.name, one.kind) for one in found
        }:
            found += stream.read(1.0)

    ordered = [(one.name, one.kind) for one in sorted(found, key=lambda one: one.stamp)]
    chain = [
        ("first", "TaskSent"),
        ("first", "TaskReceived"),
        ("first", "TaskStarted"),
        ("second", "TaskSent"),
        ("second", "TaskReceived"),
        ("second", "TaskStarted"),
        ("second", "TaskSucceeded"),
    ]
    assert [one for one in ordered if one in chain] == chain
    assert behind.clock.now() < ahead.clock.now()  # the moments of both are the store's


def test_message_has_the_clock_of_its_sending_while_events_are_on(fleet: Fleet) -> None:
    """L06."""
    server = fleet.server(events=False)
    for turn in ("off", "on", "off"):
        {"on": server.events.enable, "off": server.events.disable}[turn]()
        server.send_task(Signature.of("add", 1, 2))
    server.events.enable()
    server.events.enable()
    server.send_task(Signature.of("add", 1, 2))

    off, first, off_again, second = map(clock_of, server.broker.get_pending_tasks())
    assert (off, off_again, second - first) == (0, 0, 1)


def test_nothing_is_made_while_events_are_off(fleet: Fleet) -> None:
    """T42: no event, no thread, no record, no clock."""
    server = fleet.server(events=False)
    task = server.register_task("add", add)
    topic, clock = server.broker.subscribe(EVENTS), server.app.lamport.value
    before = set(threading.enumerate())  # an earlier test's may still end

    with server.new_worker("ada", 1):
        assert server.events.wanted == frozenset()
        assert task.send(1, 2).get(timeout=HANG) == 3
        made = set(threading.enumerate()) - before
        assert [one.name for one in made if "events" in one.name] == []

    assert topic.read(0.0) == []
    assert server.app.lamport.value == clock


def test_no_end_is_made_for_a_listener_of_workers_alone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, made = fleet.server(events=False), list[Event]()
    monkeypatch.setattr(server.events, "emit", made.append)
    server.events.subscribe(WorkerOnline, lambda event: None)

    with server.new_worker("ada", 1):
        assert server.register_task("add", add).send(1, 2).get(timeout=HANG) == 3

    assert not [one for one in made if isinstance(one, TaskEvent)]


def test_unique_task_carries_the_clock_of_its_sending(fleet: Fleet) -> None:
    """L06."""
    ahead, runner = fleet.server(), fleet.server()
    ahead.app.lamport.adjust(ahead.app.lamport.value + 10**12)
    for server in (ahead, runner):
        server.task("add", unique=True)(add)

    with runner.events.stream(TaskEvent) as stream, runner.new_worker("ada", 1):
        ahead.get_registered_task("add").send(1, 2)
        ahead.app.publisher.close()
        found = until(stream, TaskSucceeded)

    assert kinds(sorted(found, key=lambda one: one.stamp))[0] == "TaskSent"


def test_stream_of_some_kinds_leaves_the_others_out(fleet: Fleet) -> None:
    """L20: by class, or by a base."""
    server = fleet.server()
    task = server.register_task("add", add)
    with (
        server.events.stream(TaskSucceeded, WorkerOffline) as exact,
        server.events.stream(WorkerEvent) as workers,
    ):
        with server.new_worker("ada", 1):
            task.send(1, 2).get(timeout=HANG)
        assert kinds(until(exact, WorkerOffline)) == ["TaskSucceeded", "WorkerOffline"]
        assert kinds(until(workers, WorkerOffline)) == ["WorkerOnline", "WorkerOffline"]
    with pytest.raises(TypeError, match=r"found 'TaskSent' \(expected classes"):
        server.events.stream("TaskSent")  # type: ignore[call-overload]


def test_new_process_has_a_later_clock_than_those_before(fleet: Fleet) -> None:
    """L04, L16: also after all have ended."""
    first = fleet.server()
    task = first.register_task("add", add)
    with first.events.stream() as stream:
        with first.new_worker("ada", 1):
            for number in range(20):
                task.send(number, 1).get(timeout=HANG)
        before = until(stream, WorkerOffline)
        with fleet.server().new_worker("bob", 1):
            pass
        after = until(stream, WorkerOffline)

    assert after[0].kind == "WorkerOnline"
    assert max(one.clock for one in before) < after[0].clock


def test_coroutine_reads_a_stream_and_may_be_cancelled(fleet: Fleet) -> None:
    server = fleet.server()

    async def read() -> list[str]:
        found = []
        async with server.events.stream(TaskSent) as stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
            for name in ("a", "b"):
                await server.send_task_async(Signature(name=name))
            async for event in stream:
                found.append(event.name)
                if len(found) == 2:
                    stream.close()
        return found

    assert asyncio.run(read()) == ["a", "b"]


def test_thread_that_a_cancelled_read_left_behind_takes_nothing_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fleet.server()
    read_of_memory, reader = RowsSubscription.read, threading.Lock()

    def read_alone(subscription: RowsSubscription, timeout: float) -> list[bytes]:
        assert reader.acquire(blocking=False)  # a subscription is for one thread
        try:
            return read_of_memory(subscription, timeout)
        finally:
            reader.release()

    monkeypatch.setattr(RowsSubscription, "read", read_alone)

    async def read() -> str:
        async with server.events.stream(TaskSent) as stream:
            waiting = asyncio.create_task(anext(stream))
            while not reader.locked():
                await asyncio.sleep(0)
            waiting.cancel()
            next_one = asyncio.create_task(anext(stream))
            await asyncio.to_thread(int)  # a thread has taken up `next_one` before
            await server.send_task_async(Signature(name="a"))
            return str((await next_one).name)

    assert asyncio.run(asyncio.wait_for(read(), HANG)) == "a"


def test_events_that_come_together_are_in_the_order_of_their_stamps(bare: Bare) -> None:
    """L09, L17."""
    at = dt.datetime.now(UTC)
    for clock, worker in [(2, "b"), (10, "a"), (2, "a"), (1, "b")]:
        line = line_of(WorkerOnline(worker=worker), {"clock": clock, "at": at})
        bare.broker.broadcast(EVENTS, [line], ttl=HANG)

    assert [one.stamp for one in bare.stream.read(1.0)] == [
        (1, "b"),
        (2, "a"),
        (2, "b"),
        (10, "a"),
    ]


def test_waiting_iteration_ends_when_the_stream_is_closed(fleet: Fleet) -> None:
    stream = fleet.server().events.stream()
    thread = threading.Thread(target=lambda: list(stream))
    thread.start()
    stream.close()
    thread.join(HANG)
    assert not thread.is_alive()


# Faults


class AwayBroker(MemoryBroker):
    """A broker whose topics are away, or hang, when the test says so."""

    is_away = False
    fault: Exception = BrokerUnavailable("away")
    may_answer = threading.Event()

    def subscribe(self, topic: str, *, since: float = 0.0) -> Subscription:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().subscribe(topic, since=since)

    def broadcast(self, topic: str, records: Sequence[bytes], *, ttl: float) -> None:
        if topic == EVENTS:
            assert self.may_answer.wait(HANG)
        if self.is_away:
            raise self.fault
        super().broadcast(topic, records, ttl=ttl)


class Bare:
    """A publisher on a broker of its own."""

    def __init__(self) -> None:
        self.broker = AwayBroker(MemoryRows(SYSTEM_CLOCK))
        self.broker.may_answer = threading.Event()
        self.broker.may_answer.set()
        self.bus, self.clock = EventBus(), LamportClock()
        self.publisher = EventPublisher(
            self.bus, self.clock, now=SYSTEM_CLOCK.now, broker=lambda: self.broker
        )
        self.stream: EventStream[Event] = EventStream(lambda: self.broker, [Event])
        self.stream.open()
        self.publisher.enable()

    def emit(self, *names: str) -> None:
        for name in names:
            self.bus.emit(TaskSent(signature=Signature(name=name, uuid=name)))

    def names(self, count: int) -> list[str]:
        found: list[str] = []
        wait_until(
            lambda: found.extend(one.name for one in self.stream.read(1.0)) or len(found) >= count
        )
        return found


@pytest.fixture
def bare() -> Iterator[Bare]:
    bare = Bare()
    yield bare
    bare.broker.may_answer.set()
    bare.publisher.disable()
    bare.stream.close()


def test_emitter_never_waits_and_what_does_not_fit_is_counted(
    bare: Bare, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher, "QUEUE", 5)
    bare.broker.may_answer.clear()
    bare.emit("0")
    wait_until(lambda: not bare.publisher._lines)  # its thread hangs in the store

    bare.emit(*"12345678")

    assert bare.publisher.lost == 3
    assert caplog.text.count("events are lost: more than 5 are waiting") == 1
    bare.broker.may_answer.set()
    assert bare.names(6) == list("012345")
    bare.publisher.emit_heartbeat(worker="w", active=0, processed=0, slots=1, interval=1.0)
    assert [one.lost for one in until(bare.stream, WorkerHeartbeat)] == [3]


def test_stream_counts_what_its_senders_could_not_send(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender has no heartbeat that could tell."""
    monkeypatch.setattr(publisher, "QUEUE", 5)
    bare.broker.may_answer.clear()
    bare.emit("0")
    wait_until(lambda: not bare.publisher._lines)  # its thread hangs in the store
    bare.emit(*"12345678")
    bare.broker.may_answer.set()
    assert bare.names(6) == list("012345")
    assert bare.stream.missed == 3

    bare.broker.is_away, bare.broker.fault = True, BrokerUnavailable("away")
    bare.emit("a", "b")
    wait_until(lambda: bare.publisher.lost == 5)
    bare.broker.is_away = False
    bare.emit("c")
    assert bare.names(1) == ["c"]
    assert bare.stream.missed == 5


def test_stream_hears_of_lost_events_when_their_sender_ends(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.broker.is_away, bare.broker.fault = True, BrokerUnavailable("away")
    bare.emit("a", "b")
    wait_until(lambda: bare.publisher.lost == 2)
    bare.broker.is_away = False

    bare.publisher.close()

    assert bare.stream.read(1.0) == []
    assert bare.stream.missed == 2


@pytest.mark.parametrize("fault", [BrokerUnavailable("away"), OverflowError("away")], ids=repr)
def test_store_that_is_away_costs_events_and_nothing_else(
    bare: Bare, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    bare.broker.is_away, bare.broker.fault = True, fault
    bare.emit("a", "b")
    wait_until(lambda: "(2 of this process so far)" in caplog.text)
    assert "events are lost: " in caplog.text
    assert "away" in caplog.text
    assert bare.publisher.lost == 2

    bare.broker.is_away = False
    bare.emit("c")
    assert bare.names(1) == ["c"]


def test_events_of_many_threads_keep_their_form_and_have_a_clock_each(bare: Bare) -> None:
    """L21."""
    together(8, lambda thread: bare.emit(*(f"{thread}-{number}" for number in range(200))))
    bare.publisher.close()

    found: list[Any] = []
    wait_until(lambda: found.extend(bare.stream.read(1.0)) or len(found) >= 1600)
    assert sorted(one.clock for one in found) == list(range(1, 1601))
    by_thread: dict[str, list[int]] = {}
    for one in found:
        thread, _, number = one.name.partition("-")
        by_thread.setdefault(thread, []).append(int(number))
    assert by_thread == {str(thread): list(range(200)) for thread in range(8)}


def test_child_of_a_fork_sends_its_own_events_alone(bare: Bare) -> None:
    bare.broker.may_answer.clear()
    bare.emit("parent")
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            bare.broker.may_answer = threading.Event()
            bare.broker.may_answer.set()
            bare.emit("child")
            bare.publisher.close()
            os.write(sender, ",".join(one.name for one in bare.stream.read(1.0)).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    with open(receiver, "rb", closefd=True) as pipe:
        os.close(sender)
        assert pipe.read() == b"child"
    bare.broker.may_answer.set()
    assert bare.names(1) == ["parent"]


def record(**fields: object) -> bytes:
    return json.dumps({"kind": "TaskStarted", "at": "2026-01-01T00:00:00Z", **fields}).encode()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"{}\n\n1",
        record(kind=[]),
        record(kind="OfTheFuture"),
        record(clock="x"),
        record(at=1e300),
        record(at="2026-01-01T00:00:00"),
        record(at="9999-12-31T23:59:59Z"),
        record(at="0001-01-01T00:00:00Z"),
        record(kind="TaskSucceeded"),
        record(kind="TaskSucceeded", runtime=10**400),
        b"[" * 60_000,
        b'{"kind": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    ],
)
def test_foreign_records_are_left_out(bare: Bare, record: bytes) -> None:
    MemoryBroker.broadcast(bare.broker, EVENTS, [record, record], ttl=HANG)
    bare.emit("a")
    assert bare.names(1) == ["a"]


def test_line_that_is_no_event_costs_no_other_of_its_record(bare: Bare) -> None:
    good = record(kind="TaskSent", name="a", uuid=5, attempt=[], signature={"name": 7})
    MemoryBroker.broadcast(bare.broker, EVENTS, [b"\n".join([b"x", good, b"{"])], ttl=HANG)

    [event] = bare.stream.read(1.0)
    assert isinstance(event, TaskSent)
    assert (event.name, event.uuid, event.attempt) == ("a", "5", 1)


def test_foreign_records_are_told_once_a_minute(
    bare: Bare, caplog: pytest.LogCaptureFixture
) -> None:
    MemoryBroker.broadcast(bare.broker, EVENTS, [b"garbage"] * 5, ttl=HANG)
    bare.emit("a")
    bare.names(1)
    assert caplog.text.count("a record on topic 'events' is not of events") == 1


def test_event_that_cannot_be_sent_is_lost_alone(
    bare: Bare, caplog: pytest.LogCaptureFixture
) -> None:
    for reason in ("half \ud800", "r" * 70_000):
        bare.bus.emit(TaskRejected(signature=Signature(name="a"), worker="w", reason=reason))
    bare.emit("b")

    assert bare.names(1) == ["b"]
    assert bare.publisher.lost == 2
    assert "events are lost: " in caplog.text


def test_records_are_filled_up_to_their_size() -> None:
    event = TaskFailed(
        signature=Signature(name="n" * 200, uuid="u"),
        worker="w",
        error="\x01" * 100_000,
        error_type="E",
        traceback="\x01" * 100_000 + "the last line",
    )
    long = line_of(event, {"at": dt.datetime.now(UTC)})
    short = line_of(TaskSent(signature=Signature(name="a")), {"at": dt.datetime.now(UTC)})

    records = [*packed([long] * 5 + [short] * 401)]

    assert max(map(len, records)) <= 65_536
    kinds = {"TaskFailed": TaskFailed, "TaskSent": TaskSent}
    lines = [line for record in records for line in record.split(b"\n")]
    found: list[Any] = [event_of(line, kinds) for line in lines]
    assert [one.kind for one in found] == ["TaskFailed"] * 5 + ["TaskSent"] * 401
    assert found[0].traceback.endswith("the last line")
    assert found[0].error.endswith("… (100,000 characters)")
    assert len(records) < 8


# The life of a worker


def test_worker_tells_its_end_once_and_beats_until_then(fleet: Fleet) -> None:
    """T38, T40, T44, T45, T47: while all its slots are busy, and while it stops."""
    server, go_on = fleet.server(), threading.Event()
    task = server.register_task("wait", lambda: print(go_on.wait(HANG)))
    beats: list[WorkerHeartbeat] = []
    server.events.subscribe(WorkerHeartbeat, beats.append)

    with server.events.stream() as stream:
        worker = server.new_worker("ada", 1)
        worker.start()
        task.send()
        found: list[Any] = []
        wait_until(
            lambda: (
                found.extend(stream.read(1.0))
                or sum(one.kind == "WorkerHeartbeat" and one.active == 1 for one in found) >= 2
            )
        )
        worker.quit()
        seen = len(beats)
        wait_until(lambda: len(beats) >= seen + 2)
        go_on.set()
        worker.stop()
        worker.stop()
        found += stream.read(0.0)  # it was sent before `stop` returned
        assert stream.read(0.3) == []  # more than a beat

    assert kinds(found).count("WorkerOffline") == 1
    assert found[-1].kind == "WorkerOffline"
    beat = next(one for one in found if one.kind == "WorkerHeartbeat")
    assert (beat.interval, beat.version, beat.platform) == (0.25, __version__, sys.platform)
    assert len(beat.load) == 3


# Camera


def test_camera_is_shown_the_state_of_the_fleet(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "PAUSE", 0.01)
    server = fleet.server()
    task = server.register_task("add", add)
    shots: list[tuple[list[str], int, int]] = []
    called = threading.Event()

    def camera(state: FleetState) -> None:
        tally = state.tasks.get("add")
        shots.append(
            ([one.name for one in state.alive()], tally.succeeded if tally else 0, len(shots))
        )
        called.set()
        if len(shots) <= 2:
            raise (RuntimeError, SystemExit)[len(shots) - 1]("mine")

    handle = server.events.every(0.05, camera)
    assert called.wait(HANG)
    with server.new_worker("ada", 1):
        task.send(1, 2).get(timeout=HANG)
        wait_until(lambda: shots[-1][:2] == (["ada"], 1))
    wait_until(lambda: shots[-1][:2] == ([], 1))
    handle.stop()
    handle.stop()
    server.events.every(LONG, camera).stop()
    server.events.every(LONG, camera)
    assert len(server.events._cameras) == 1
    count = len(shots)
    server.close()
    assert len(shots) == count
    with pytest.raises(ValueError, match=r"seconds: found 0 .*more than 0\)"):
        server.events.every(0, camera)


class WithoutTopics(MemoryBroker):
    """A broker of somebody who has not made topics."""

    features = msgspec.structs.replace(MemoryBroker.features, topics=False)
    subscribe = Broker.subscribe  # type: ignore[assignment]  # as they inherit it


def test_broker_without_topics_is_refused_in_words() -> None:
    broker = WithoutTopics(MemoryRows(SYSTEM_CLOCK))
    events = ServerEvents(LamportClock(), now=SYSTEM_CLOCK.now, broker=lambda: broker)

    text = "WithoutTopics has no topics; 'events' cannot be used"
    with pytest.raises(Unsupported, match=text):
        events.every(1.0, print)
    with pytest.raises(Unsupported, match=text), events.stream():
        pass
    with pytest.raises(Unsupported, match=text):
        next(events.stream())


def test_rates_are_counted_from_the_past_only_where_the_broker_keeps_it(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    for keeps, since in (True, 60.0), (False, 0.0):
        features = msgspec.structs.replace(MemoryBroker.features, keeps_topics=keeps)
        monkeypatch.setattr(AwayBroker, "features", features)
        shown: list[float] = []
        begun = time.monotonic()
        events = ServerEvents(bare.clock, now=SYSTEM_CLOCK.now, broker=lambda: bare.broker)
        camera = events.every(0.01, lambda state: shown.append(state.since), since=60.0)  # noqa: B023
        wait_until(lambda: shown)  # noqa: B023
        camera.stop()
        assert 0 <= shown[0] - (begun - since) < 30


def test_stream_and_camera_wait_for_a_broker_that_is_away(
    bare: Bare, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "PAUSE", 0.01)
    bare.broker.is_away = True
    stream = EventStream(lambda: bare.broker, [TaskSent])
    assert stream.read(0.05) == []
    assert stream.read(0.05) == []
    assert caplog.text.count("events cannot be read: away; the stream waits") == 1

    bare.broker.is_away = False
    assert stream.read(0.0) == []
    bare.emit("a")
    assert [one.name for one in until(stream, TaskSent)] == ["a"]
    stream.close()
