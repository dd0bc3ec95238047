"""The public promises of machinery_py.testing: the clock, the waiting, and faults on command."""

from __future__ import annotations

import datetime as dt
import functools
import random
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from machinery_py.backends.base import ALREADY, SETTLED, Change
from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.base import Delivery, Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    PublishRefused,
    PublishUnknown,
)
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Settlement, Store, Submission
from machinery_py.stores.rows import RowsStore
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from machinery_py.testing.flaky import Faults, FlakyBackend, FlakyBroker, FlakyStore
from machinery_py.testing.waiting import together, wait_until

T = TypeVar("T")


def memory_store(clock: ManualClock) -> Store:
    hub = MemoryRows(clock)
    return RowsStore(MemoryBroker(hub), MemoryBackend(hub))


class TestFlakyBrokerWithoutFaults(BrokerConformance):
    @pytest.fixture
    def open_broker(self, clock: ManualClock) -> OpenBroker:
        broker = FlakyBroker(MemoryBroker(MemoryRows(clock)))
        return lambda: broker


class TestFlakyBackendWithoutFaults(BackendConformance):
    @pytest.fixture
    def open_backend(self, clock: ManualClock) -> OpenBackend:
        backend = FlakyBackend(MemoryBackend(MemoryRows(clock), expire_in=self.expire_in))
        return lambda: backend


class TestFlakyStoreWithoutFaults(SettlementConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        store = FlakyStore(memory_store(clock))
        return lambda: store


def success(delivery: Delivery) -> Settlement:
    """With one callback, on the queue c."""
    uuid = delivery.body.decode()
    callback = Message(uuid="c", name="c", queue="c", body=delivery.body)
    return Settlement(
        delivery=delivery,
        uuid=uuid,
        states=[TaskState(task_uuid=uuid, state=State.SUCCESS)],
        send=[callback],
    )


def submission(uuid: str, token: str) -> Submission:
    message = Message(uuid=uuid, name="add", queue="q", body=uuid.encode())
    return Submission(token=token, messages=[message], states=[TaskState(task_uuid=uuid)])


def test_a_refused_call_is_not_carried_out() -> None:
    store = FlakyStore(memory_store(ManualClock()))
    store.next_call("submit")

    with pytest.raises(PublishRefused):
        store.submit(submission("a", "t"))

    assert store.broker.pending("q", 9) == []
    store.submit(submission("a", "t"))
    assert len(store.broker.pending("q", 9)) == 1
    assert store.faults.failed == [("submit", False)]


def test_a_call_whose_reply_is_lost_is_carried_out() -> None:
    store = FlakyStore(memory_store(ManualClock()))
    store.next_call("submit", lose_reply=True)
    with pytest.raises(PublishUnknown):
        store.submit(submission("a", "t"))
    session = store.open_session(["q"], worker="w")
    (delivery,) = session.receive(1, 0)
    end = Settlement(
        delivery=delivery, uuid="a", states=[TaskState(task_uuid="a", state=State.SUCCESS)]
    )

    store.next_call("settle")
    store.next_call("settle", lose_reply=True)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            session.settle([end])

    assert session.settle([end]) == [ALREADY]
    assert store.faults.failed == [("submit", True), ("settle", False), ("settle", True)]


def test_brokers_and_backends_fail_on_command() -> None:
    hub = MemoryRows(ManualClock())
    faults = Faults()
    broker, backend = (
        FlakyBroker(MemoryBroker(hub), faults),
        FlakyBackend(MemoryBackend(hub), faults),
    )
    consumer = broker.consume(["q"], worker="w")
    message = Message(uuid="a", name="add", queue="q", body=b"a")

    faults.next_call("put", lose_reply=True)
    with pytest.raises(PublishUnknown):
        broker.put([message], token="t")
    assert broker.put([message], token="t") is False

    faults.next_call("receive", lose_reply=True)
    with pytest.raises(BrokerUnavailable):
        consumer.receive(1, 0)
    assert broker.workers()[0].holding == 1

    faults.next_call("apply", lose_reply=True)
    with pytest.raises(BackendUnavailable):
        backend.apply([Change(key="a", states=[TaskState(task_uuid="a")])])
    assert backend.get_state("a").state is State.PENDING


def test_the_same_seed_gives_the_same_faults() -> None:
    def failed(seed: int) -> list[tuple[str, bool]]:
        store = FlakyStore(
            memory_store(ManualClock()), Faults(rng=random.Random(seed), probability=0.2)
        )
        for number in range(100):
            try:
                store.submit(submission(f"t{number}", f"{number}"))
            except (PublishRefused, PublishUnknown):
                pass
        return store.faults.failed

    assert failed(1) == failed(1) != failed(2)
    assert 5 < len(failed(1)) < 50
    assert {carried_out for _, carried_out in failed(1)} == {True, False}


def test_repeated_calls_complete_each_task_once() -> None:
    clock = ManualClock()
    store = FlakyStore(memory_store(clock), Faults(rng=random.Random(3), probability=0.1))

    def insist(call: Callable[[], T]) -> T:
        for _ in range(100):
            try:
                return call()
            except (PublishRefused, PublishUnknown):
                pass
        raise AssertionError("a hundred faults in a row")

    for number in range(200):
        insist(functools.partial(store.submit, submission(f"t{number}", f"token{number}")))
    for _ in range(3):
        session = store.open_session(["q"], worker="w")
        while found := insist(functools.partial(session.receive, 10, 0)):
            ends = [success(delivery) for delivery in found]
            assert set(insist(functools.partial(session.settle, ends))) <= {SETTLED, ALREADY}
        session.close()  # what a lost reply to `receive` left with it goes back

    assert store.faults.failed != []
    assert sorted(message.body for message in store.broker.pending("c", 999)) == sorted(
        b"t%d" % n for n in range(200)
    )


def test_healing_ends_all_faults() -> None:
    store = FlakyStore(memory_store(ManualClock()), Faults(probability=1.0))
    store.next_call("submit")
    store.faults.heal()
    store.submit(submission("a", "t"))


def test_manual_clock_moves_only_when_advanced() -> None:
    start = dt.datetime(2030, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    clock = ManualClock(start)
    before = clock.monotonic()

    clock.advance(1.5)
    clock.advance(hours=1, minutes=1)

    assert clock.now() == start + dt.timedelta(seconds=3661.5)
    assert clock.now().utcoffset() == dt.timedelta()
    assert clock.monotonic() - before == 3661.5


def test_the_clock_never_goes_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match=r"by -1 s"):
        clock.advance(-1.0)
    with pytest.raises(ValueError, match="naive"):
        ManualClock(dt.datetime(2030, 1, 1))
    assert clock.monotonic() == 0.0


def test_threads_may_advance_the_clock() -> None:
    clock = ManualClock()

    def advance(_: int) -> None:
        for _ in range(250):
            clock.advance(0.5)

    together(8, advance)
    assert clock.monotonic() == 1000.0


def test_wait_until_ends_when_the_condition_is_true() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.set)
    thread.start()
    wait_until(done.is_set, what="the thread")
    thread.join()


def test_wait_until_names_the_condition_at_its_timeout() -> None:
    with pytest.raises(AssertionError, match=r"the moon: not true after 0.02 s"):
        wait_until(lambda: False, timeout=0.02, what="the moon")


def test_an_error_in_one_of_the_threads_is_raised() -> None:
    def fail(index: int) -> int:
        if index == 2:
            raise KeyError("two")
        return index

    with pytest.raises(KeyError):
        together(3, fail)
    assert together(3, lambda index: index) == [0, 1, 2]
