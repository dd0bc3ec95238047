"""Settler, receiver, executors and the inline worker, with stores that fail on command."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from machinery_py import Config, Context, Server, Signature, State, TaskFailed, current_task, group
from machinery_py.backends.base import Change, Verdict
from machinery_py.backends.memory import MemoryBackend
from machinery_py.bounds import STEP_BYTES
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.clock import SystemClock
from machinery_py.errors import ArgumentError, BrokerUnavailable, MachineryError, PublishUnknown
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Mark, Session, Settlement
from machinery_py.stores.outbox import TwoStores
from machinery_py.stores.rows import RowsSession, RowsStore
from machinery_py.tasks.signature import HEADER_EXPIRES
from machinery_py.testing.flaky import FlakyBackend, FlakyStore
from machinery_py.testing.waiting import HANG, together, wait_until
from machinery_py.worker.loops import settler
from machinery_py.worker.loops.receiver import BACKOFF, BACKOFF_MARGIN, UnknownTaskBackoff
from tests.support.apps import Bench, bench

__all__ = ["bench"]


class Faulty(Bench):
    """A Bench in real time, over a store that fails on command."""

    def __init__(self) -> None:
        super().__init__()
        stores = self.server.app.stores
        self.store = stores.store = FlakyStore(stores.store)


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    bench = Faulty()
    yield bench
    bench.server.close()


# The store fails


def test_a_settlement_that_was_refused_is_repeated(faulty: Faulty) -> None:
    for _ in range(3):
        faulty.store.next_call("settle")
    with faulty.server.new_worker(concurrency=2) as worker:
        result = faulty.add.signature(1, 2).then(faulty.note.partial("then")).send()
        assert result.get(timeout=HANG) == 3
        wait_until(lambda: faulty.calls == [("then", 3)])
        wait_until(lambda: worker.ready)


def test_a_settlement_whose_reply_was_lost_is_settled_once(faulty: Faulty) -> None:
    for _ in range(6):
        faulty.store.next_call("settle", lose_reply=True)
    with faulty.server.new_worker(concurrency=2) as worker:
        results = [
            faulty.add.signature(i, i).then(faulty.note.partial(i)).send() for i in range(20)
        ]
        assert [result.get(timeout=HANG) for result in results] == [2 * i for i in range(20)]
        wait_until(lambda: len(faulty.calls) == 20 and worker.processed == 40)
    assert sorted(faulty.calls) == [(i, 2 * i) for i in range(20)]


def test_a_broker_that_is_away_for_a_while_is_waited_for(
    faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty.server.new_worker(concurrency=2) as worker:
        wait_until(lambda: worker.ready)
        for _ in range(3):
            faulty.store.next_call("receive")
        with caplog.at_level(logging.ERROR, "machinery_py"):
            results = [faulty.add.send(i, i) for i in range(5)]
            assert [result.get(timeout=HANG) for result in results] == [0, 2, 4, 6, 8]
            wait_until(lambda: worker.ready)


def hurry(faulty: Faulty) -> None:
    """No time to repeat a submission."""
    faulty.server.app.config = faulty.server.config.replace(publish_timeout=0.001)


def test_a_refused_send_leaves_nothing(faulty: Faulty) -> None:
    hurry(faulty)
    faulty.store.next_call("submit")
    with pytest.raises(BrokerUnavailable):
        faulty.add.send(1, 2)
    assert faulty.server.inspect.tasks() == []


def test_a_refused_send_is_repeated(faulty: Faulty) -> None:
    faulty.store.next_call("submit")
    faulty.add.send(1, 2)
    assert len(faulty.server.inspect.tasks()) == 1


def test_a_send_without_a_reply_is_repeated_and_not_doubled(faulty: Faulty) -> None:
    faulty.store.next_call("submit", lose_reply=True)
    faulty.add.send(1, 2)
    assert len(faulty.server.broker.get_pending_tasks()) == 1


def test_a_send_without_a_reply_may_have_happened(faulty: Faulty) -> None:
    hurry(faulty)
    faulty.store.next_call("submit", lose_reply=True)
    with pytest.raises(PublishUnknown):
        faulty.add.options(uuid="task_1").send(1, 2)
    assert faulty.server.result("task_1").get_state().state is State.PENDING


def test_a_chord_whose_firing_fails_is_fired_later(faulty: Faulty) -> None:
    faulty.store.next_call("fire")
    with faulty.server.new_worker(concurrency=2):
        first = (
            group(faulty.add.signature(1, 1), faulty.add.signature(2, 2)) | faulty.add.partial()
        ).send()
        second = (
            group(faulty.add.signature(1, 1), faulty.add.signature(2, 2)) | faulty.add.partial()
        ).send()
        assert [first.get(timeout=HANG), second.get(timeout=HANG)] == [6, 6]


def test_deliveries_whose_begin_failed_go_back_and_run_later() -> None:
    bench = Bench()
    stores = bench.server.app.stores
    hub = MemoryRows()
    backend = FlakyBackend(MemoryBackend(hub))
    stores.store = TwoStores(MemoryBroker(MemoryRows()), backend, SystemClock())
    for _ in range(3):
        backend.faults.next_call("begin")
    with bench.server.new_worker(concurrency=2):
        assert [bench.add.send(i, 1).get(timeout=HANG) for i in range(5)] == [1, 2, 3, 4, 5]
    bench.server.close()


def test_tasks_run_when_revocations_cannot_be_read() -> None:
    bench = Bench()
    stores = bench.server.app.stores
    backend = FlakyBackend(MemoryBackend(MemoryRows()))
    stores.store = TwoStores(MemoryBroker(MemoryRows()), backend, SystemClock())
    for _ in range(3):
        backend.faults.next_call("revoked")
    with bench.server.new_worker(concurrency=2):
        assert [bench.add.send(i, 1).get(timeout=HANG) for i in range(5)] == [1, 2, 3, 4, 5]
    bench.server.close()


# The inline worker


def test_a_task_that_drains_drains_nothing(bench: Bench) -> None:
    @bench.server.task
    def inner() -> int:
        bench.note.send("sent inside")
        return bench.drain()

    result = inner.send()
    assert bench.drain() == 2
    assert result.get(timeout=0) == 0
    assert bench.calls == [("sent inside",)]


def test_eager_runs_inside_send() -> None:
    server = Server(Config(broker="eager"))

    @server.task(retries=2)
    def flaky() -> int:
        attempt = current_task().attempt
        if attempt < 3:
            raise ConnectionError("away")
        return attempt

    assert flaky.send().get(timeout=0) == 3
    assert flaky.options(delay=3600).send().get(timeout=0) == 3
    server.close()


def test_eager_runs_callbacks_on_queues_that_are_new() -> None:
    server = Server(Config(broker="eager"))
    calls: list[int] = []
    add = server.register_task("add", lambda a, b: a + b)
    note = server.register_task("note", calls.append)
    callback: Signature[Any] = note.partial().replace(routing_key="mail")
    server.send_task(add.partial(1, 2).then(callback))
    server.close()
    assert calls == [3]


# Executions


def test_long_messages_are_claimed_a_few_megabytes_at_a_time(bench: Bench) -> None:
    held: list[int] = []

    @bench.server.task
    def look(text: str) -> None:
        if len(held) % 20 == 0:
            held.append(sum(one.running for one in bench.server.broker.stats()))
        else:
            held.append(0)

    bench.server.send_group(group([look.signature("x" * 500_000)] * 200))
    with bench.server.new_worker(concurrency=1):
        wait_until(lambda: len(held) == 200)

    assert (
        max(held) <= 2 * 2**22 / 500_000 + 1
    )  # with those that have ended and are not settled yet


def test_a_large_result_is_refused(bench: Bench) -> None:
    large = bench.server.register_task("large", lambda: "x" * 2_000_000)
    result = large.send()
    bench.drain()
    with pytest.raises(
        TaskFailed, match=r"the result has 2,000,\d+ bytes, more than max_result_size = 1,048,576"
    ):
        result.get(timeout=0)


def test_failing_publish_handler_of_a_callback_fails_its_task(bench: Bench) -> None:
    @bench.server.set_pre_publish_handler
    def broken(signature: Signature[Any]) -> None:
        if signature.name == "note":
            raise RuntimeError("my handler")

    result = bench.add.signature(1, 2).then(bench.note.partial()).send()
    bench.drain()
    with pytest.raises(TaskFailed, match="cannot be sent: my handler"):
        result.get(timeout=0)


@pytest.mark.parametrize("text", ["", "soon", "1e999"])
def test_an_expiry_that_is_no_number_is_none(bench: Bench, text: str) -> None:
    result = bench.server.send_task(
        bench.add.signature(1, 2).with_headers(**{HEADER_EXPIRES: text})
    )
    bench.drain()
    assert result.get(timeout=0) == 3


def test_error_without_a_readable_text_fails_its_task(bench: Bench) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def breaks() -> None:
        raise Broken

    def half() -> None:
        raise ValueError("\ud800")

    for name, function in (("breaks", breaks), ("half", half)):
        result = bench.server.register_task(name, function).send()
        bench.drain()
        assert result.get_state().state is State.FAILURE
        assert result.get_state().error


def test_progress_is_kept_back_but_for_the_last(bench: Bench) -> None:
    reports: list[tuple[float, float] | None] = []
    context = Context(Signature(name="t"), queue="", delivery=1, worker="", report=reports.append)
    assert list(context.track(range(1000))) == list(range(1000))
    last, count = reports[-1], len(reports)
    assert (last, count < 100) == ((1000, 1000), True)
    silent = Context(Signature(name="t"), queue="", delivery=1, worker="", report=None)
    assert list(silent.track(iter("ab"))) == ["a", "b"]


# Workers


def test_a_worker_cannot_be_started_twice(bench: Bench) -> None:
    worker = bench.server.new_worker(concurrency=1)
    with worker, pytest.raises(MachineryError, match="runs already"):
        worker.start()
    assert worker.stop()


def test_a_short_task_alone_is_settled_without_a_mark_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        settler, "MARK_DELAY", HANG
    )  # so that however slow this machine is, only a settlement ends the wait
    commits: list[tuple[int, int]] = []
    store = bench.server.app.stores.store
    open_session = store.open_session

    def opened(*args: Any, **kwargs: Any) -> Any:
        session = open_session(*args, **kwargs)
        settle = session.settle

        def counted(settlements: Any, marks: Any = ()) -> Any:
            commits.append((len(settlements), len(marks)))
            return settle(settlements, marks)

        monkeypatch.setattr(session, "settle", counted)
        return session

    monkeypatch.setattr(store, "open_session", opened)
    with bench.server.new_worker(concurrency=1):
        for number in range(20):
            assert bench.add.send(number, 1).get(timeout=HANG) == number + 1
    assert commits == [(1, 0)] * 20


def test_many_senders_and_one_worker() -> None:
    bench = Bench()
    with bench.server.new_worker(concurrency=4):
        found = together(8, lambda n: [bench.add.send(n, i).get(timeout=HANG) for i in range(25)])
    assert found == [[n + i for i in range(25)] for n in range(8)]
    bench.server.close()


def test_nothing_is_taken_while_the_consume_handler_says_no() -> None:
    bench = Bench()
    allowed = threading.Event()
    asked = threading.Event()
    worker = bench.server.new_worker(concurrency=1)

    @worker.set_pre_consume_handler
    def may(_: object) -> bool:
        asked.set()
        return allowed.is_set()

    result = bench.add.send(1, 2)
    with worker:
        assert asked.wait(HANG)
        assert result.get_state().state is State.PENDING
        allowed.set()
        assert result.get(timeout=HANG) == 3
    bench.server.close()


def test_launch_can_be_ended_from_another_thread() -> None:
    bench = Bench()
    errors: list[BaseException] = []
    worker = bench.server.new_worker(concurrency=1)
    thread = worker.launch_async(errors.append)
    assert bench.add.send(1, 2).get(timeout=HANG) == 3
    worker.quit()
    thread.join(HANG)
    assert not thread.is_alive()
    assert errors == []
    bench.server.close()


def test_backoff_begins_before_an_unknown_task_is_redelivered() -> None:
    backoff = UnknownTaskBackoff()
    assert backoff.starts_in(0.0) == math.inf

    backoff.expect(10.0)
    backoff.expect(10.02)

    assert backoff.starts_in(0.0) == pytest.approx(10.0 - BACKOFF_MARGIN)
    assert backoff.starts_in(10.0 - BACKOFF_MARGIN) == 0.0
    assert backoff.start(10.0 - BACKOFF_MARGIN) == pytest.approx(2 * BACKOFF_MARGIN)
    assert (
        backoff.starts_in(10.0 + BACKOFF_MARGIN + BACKOFF) == math.inf
    )  # the second came with the first


def test_backoff_takes_a_small_share_of_the_time() -> None:
    backoff = UnknownTaskBackoff()
    for number in range(1000):
        backoff.expect(number / 100)
    now = paused = 0.0

    while (pause := backoff.starts_in(now)) != math.inf:
        now += pause
        length = backoff.start(now) + BACKOFF
        now += length
        paused += length

    assert 9.0 < now < 12.0
    assert paused / now < 0.3


class Choosy(MemoryBackend):
    """Refuses results of more than ten letters, as a store with a limit for its items does."""

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        for state in (state for change in changes for state in change.states):
            if any(len(str(arg.value)) > 10 for arg in state.results):
                raise ArgumentError("too long")
        return super().apply(changes)


def test_result_that_cannot_be_stored_fails_task_and_chord() -> None:
    server = Server(Config(broker="memory://", result_backend="memory://"))
    hub = MemoryRows(SystemClock())
    server.app.stores.store = TwoStores(MemoryBroker(hub), Choosy(hub), SystemClock())
    repeat = server.register_task("repeat", lambda count: "x" * count)
    join = server.register_task("join", lambda *parts: "".join(parts))

    with server.new_worker("w", 2):
        results = [repeat.send(count) for count in (1, 50, 2)]
        whole = (group(repeat.signature(count) for count in (1, 50)) | join.partial()).send()
        with pytest.raises(TaskFailed, match="the result cannot be stored: too long"):
            results[1].get(timeout=HANG)
        with pytest.raises(TaskFailed, match="the result cannot be stored"):
            whole.get(timeout=HANG)
        assert [results[0].get(timeout=HANG), results[2].get(timeout=HANG)] == ["x", "xx"]
    assert {letter.reason for letter in server.inspect.dead()} == {"unstorable"}
    server.close()


class SlowSession(RowsSession):
    """Takes its time to get ready what has ended."""

    ready = threading.Event()
    asked = threading.Event()

    def prepare(self, settlement: Settlement) -> int:
        self.asked.set()
        assert self.ready.wait(HANG)
        return super().prepare(settlement)


class SlowStore(RowsStore):
    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        session = SlowSession(self, self.broker.consume(queues, worker=worker))
        SlowSession.ready.clear()
        return session


def test_stopping_worker_settles_a_task_that_has_just_ended() -> None:
    bench = Bench()
    hub = MemoryRows()
    bench.server.app.stores.store = SlowStore(MemoryBroker(hub), MemoryBackend(hub))
    result = bench.add.send(1, 2)
    worker = bench.server.new_worker(concurrency=1)
    worker.start()
    assert SlowSession.asked.wait(HANG)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    stopping.join(1.5)
    assert stopping.is_alive()  # without its result it must not end

    SlowSession.ready.set()
    stopping.join(HANG)

    assert result.get(timeout=HANG) == 3
    assert bench.server.broker.stats()[0].waiting == 0
    bench.server.close()


class NarrowSession(RowsSession):
    """Notes the commits that it was asked for. Takes `most` settlements; None takes any number."""

    gate = threading.Event()
    most: int | None = None
    commits: list[tuple[int, int]]  # settlements, and bytes of their results

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        assert self.gate.wait(HANG)
        if settlements:
            self.commits.append((len(settlements), sum(map(self.prepare, settlements))))
        if self.most is not None and len(settlements) > self.most:
            raise BrokerUnavailable(f"{len(settlements)} at once take too long")
        return super().settle(settlements, marks)


class NarrowStore(RowsStore):
    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        consumer = self.broker.consume(queues, worker=worker)
        self.session = NarrowSession(self, consumer)
        self.session.commits = []
        NarrowSession.gate.clear()
        return self.session


@pytest.fixture
def narrow() -> Iterator[tuple[Bench, NarrowStore]]:
    bench, hub = Bench(), MemoryRows()
    store = NarrowStore(MemoryBroker(hub), MemoryBackend(hub))
    bench.server.app.stores.store = store
    yield bench, store
    NarrowSession.gate.set()
    bench.server.close()


def test_commit_carries_no_more_than_one_step_may(narrow: tuple[Bench, NarrowStore]) -> None:
    bench, store = narrow
    text, began = "x" * 1_000_000, threading.Semaphore(0)

    @bench.server.task
    def large() -> str:
        began.release()
        return text

    results = [large.send() for _ in range(40)]
    with bench.server.new_worker(concurrency=40):
        # All have ended before the first is committed: all of them wait for the settler.
        assert all(began.acquire(timeout=HANG) for _ in results)
        NarrowSession.gate.set()
        assert [result.get(timeout=HANG) for result in results] == [text] * 40

    assert sum(count for count, _ in store.session.commits) == 40
    assert max(size for _, size in store.session.commits) <= STEP_BYTES


def test_commit_that_fails_is_halved_before_it_is_repeated(
    narrow: tuple[Bench, NarrowStore],
) -> None:
    bench, store = narrow
    results = [bench.add.send(number, 1) for number in range(64)]
    with bench.server.new_worker(concurrency=64):
        wait_until(lambda: len(store.broker.pending("machinery_tasks", 99)) == 0)
        store.session.most = 5
        NarrowSession.gate.set()
        assert [result.get(timeout=HANG) for result in results] == [*range(1, 65)]

    counts = [count for count, _ in store.session.commits]
    tries = list(itertools.pairwise(counts))
    assert all(after <= before // 2 for before, after in tries if before > 5)
    assert sum(count for count in counts if count <= 5) == 64
