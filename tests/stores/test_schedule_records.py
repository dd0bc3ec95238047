"""The contract of schedules' records, over every store."""

from __future__ import annotations

import pytest

from machinery_py.backends.base import Rider
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.null import NullBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, PublishUnknown, Unsupported
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.outbox import TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fencing import drain
from machinery_py.testing.conformance.schedules import ScheduleConformance, amend, bodies
from machinery_py.testing.flaky import FlakyBackend, FlakyBroker
from tests.stores.record_stores import (
    InMemory,
    InRedis,
    InRedisBesideMemory,
    InSQLite,
    InSQLiteBesideMemory,
    InTwoMemories,
)
from tests.stores.redis.case import clock, open_driver

__all__ = ["clock", "open_driver"]


class TestMemoryStore(InMemory, ScheduleConformance):
    pass


class TestSQLiteStore(InSQLite, ScheduleConformance):
    pass


class TestRedisStore(InRedis, ScheduleConformance):
    pass


class TestTwoMemoryStores(InTwoMemories, ScheduleConformance):
    pass


class TestMemoryBrokerAndRedisBackend(InRedisBesideMemory, ScheduleConformance):
    pass


class TestMemoryBrokerAndSQLiteBackend(InSQLiteBesideMemory, ScheduleConformance):
    pass


@pytest.mark.parametrize(
    ("call", "lost"), [("put", False), ("put", True), ("clear_outbox", False), ("apply", True)]
)
def test_tick_cut_off_between_two_stores_is_finished_by_another(call: str, lost: bool) -> None:
    """The scheduler dies behind the change of the record: before, in or behind the publishing."""
    clock = ManualClock()
    memory, hub = MemoryBackend(MemoryRows(clock)), MemoryRows(clock)
    broker, backend = FlakyBroker(MemoryBroker(hub)), FlakyBackend(memory)
    dying, other = TwoStores(broker, backend, clock), TwoStores(MemoryBroker(hub), memory, clock)
    (broker if call == "put" else backend).faults.next_call(call, lose_reply=lost)
    with pytest.raises((BrokerUnavailable, BackendUnavailable, PublishUnknown)):
        amend(dying, "a", None, b"1", "t")

    assert bodies(other) == {"a": b"1"}
    assert not amend(other, "a", None, b"1", "t")
    clock.advance(6.0)
    other.tend()

    assert set(drain(other, "q")) == {
        "t"
    }  # twice at most on the queue; the second is known as done, by its UUID
    assert memory.unsent(9, older_than=0.0) == []


def test_a_backend_that_keeps_nothing_refuses() -> None:
    clock = ManualClock()
    store = TwoStores(MemoryBroker(MemoryRows(clock)), NullBackend(clock), clock)
    with pytest.raises(Unsupported, match="the null backend keeps no schedules"):
        store.backend.records()
    with pytest.raises(Unsupported, match="the null backend keeps no schedules"):
        store.backend.amend(Rider(name="a", expected=None, body=b"1"))
