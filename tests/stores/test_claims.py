"""The contract of claims, over every store."""

from __future__ import annotations

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.null import NullBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, PublishUnknown, Unsupported
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.outbox import TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.claims import ClaimConformance, claim
from machinery_py.testing.conformance.fencing import drain
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


class TestMemoryStore(InMemory, ClaimConformance):
    pass


class TestSQLiteStore(InSQLite, ClaimConformance):
    pass


class TestRedisStore(InRedis, ClaimConformance):
    pass


class TestTwoMemoryStores(InTwoMemories, ClaimConformance):
    pass


class TestMemoryBrokerAndRedisBackend(InRedisBesideMemory, ClaimConformance):
    pass


class TestMemoryBrokerAndSQLiteBackend(InSQLiteBesideMemory, ClaimConformance):
    pass


@pytest.mark.parametrize(
    ("call", "lost"), [("put", False), ("put", True), ("clear_outbox", False), ("apply", True)]
)
def test_sender_that_dies_between_two_stores_has_sent_its_task(call: str, lost: bool) -> None:
    clock = ManualClock()
    memory, hub = MemoryBackend(MemoryRows(clock)), MemoryRows(clock)
    broker, backend = FlakyBroker(MemoryBroker(hub)), FlakyBackend(memory)
    dying, other = TwoStores(broker, backend, clock), TwoStores(MemoryBroker(hub), memory, clock)
    (broker if call == "put" else backend).faults.next_call(call, lose_reply=lost)
    with pytest.raises((BrokerUnavailable, BackendUnavailable, PublishUnknown)):
        claim(dying, "a", None, b"1", "t")

    assert not claim(other, "a", None, b"2", "u")
    clock.advance(6.0)
    other.tend()

    assert set(drain(other, "q")) == {
        "t"
    }  # twice at most on the queue; the second is known as done, by its UUID
    assert memory.unsent(9, older_than=0.0) == []


def test_a_backend_that_keeps_no_claims_refuses() -> None:
    backend = NullBackend(ManualClock())
    assert not backend.features.claims
    with pytest.raises(Unsupported, match="the null backend keeps no keys of unique tasks"):
        backend.claims(["a"])
    with pytest.raises(Unsupported, match="the null backend keeps no keys of unique tasks"):
        backend.release([("a", b"")])
