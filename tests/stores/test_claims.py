"""The contract of claims, over every store."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import closing

import pytest

from machinery_py._drivers.memory import MemoryHub
from machinery_py._drivers.sqlite import SQLiteDriver
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.null import NullBackend
from machinery_py.backends.redis import RedisBackend
from machinery_py.backends.sqlite import SQLiteBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.redis import RedisBroker
from machinery_py.brokers.sqlite import SQLiteBroker
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, PublishUnknown, Unsupported
from machinery_py.settlement.base import Store
from machinery_py.settlement.one_store import OneStore
from machinery_py.settlement.redis_store import RedisStore
from machinery_py.settlement.two_stores import TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.claims import ClaimConformance, OpenStore, claim
from machinery_py.testing.conformance.fencing import drain
from machinery_py.testing.flaky import FlakyBackend, FlakyBroker
from tests.stores.redis_case import Drivers, ServerClock, clock, open_driver, redis_server, redis_url

__all__ = ["clock", "open_driver", "redis_server", "redis_url"]


class TestMemoryStore(ClaimConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        hub = MemoryHub(clock)
        broker, backend = MemoryBroker(hub), MemoryBackend(hub)
        return lambda: OneStore(broker, backend, hub.transaction)


class TestSQLiteStore(ClaimConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock, tmp_path: pathlib.Path) -> Iterator[OpenStore]:
        drivers: list[SQLiteDriver] = []

        def open_store() -> Store:
            driver = SQLiteDriver(tmp_path / "machinery.db", clock=clock, synchronous="NORMAL")
            drivers.append(driver)
            return OneStore(SQLiteBroker(driver), SQLiteBackend(driver), driver.transaction)

        yield open_store
        for driver in drivers:
            driver.close()


class TestRedisStore(ClaimConformance):
    @pytest.fixture
    def clock(self, redis_url: str) -> Iterator[ServerClock]:
        with closing(ServerClock(redis_url)) as clock:
            yield clock

    @pytest.fixture
    def open_store(self, open_driver: Drivers) -> OpenStore:
        def open_store() -> Store:
            driver = open_driver()
            return RedisStore(RedisBroker(driver), RedisBackend(driver))

        return open_store


class TestTwoMemoryStores(ClaimConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        broker, backend = MemoryBroker(MemoryHub(clock)), MemoryBackend(MemoryHub(clock))
        return lambda: TwoStores(broker, backend, clock)


class TestMemoryBrokerAndRedisBackend(ClaimConformance):
    @pytest.fixture
    def clock(self, redis_url: str) -> Iterator[ServerClock]:
        with closing(ServerClock(redis_url)) as clock:
            yield clock

    @pytest.fixture
    def open_store(self, open_driver: Drivers, clock: ServerClock) -> OpenStore:
        broker = MemoryBroker(MemoryHub(clock))
        return lambda: TwoStores(broker, RedisBackend(open_driver()), clock)


class TestMemoryBrokerAndSQLiteBackend(ClaimConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock, tmp_path: pathlib.Path) -> Iterator[OpenStore]:
        broker, drivers = MemoryBroker(MemoryHub(clock)), list[SQLiteDriver]()

        def open_store() -> Store:
            drivers.append(SQLiteDriver(tmp_path / "states.db", clock=clock))
            return TwoStores(broker, SQLiteBackend(drivers[-1]), clock)

        yield open_store
        for driver in drivers:
            driver.close()


@pytest.mark.parametrize(("call", "lost"), [("put", False), ("put", True), ("clear_outbox", False), ("amend", True)])
def test_a_sender_that_dies_between_two_stores_has_sent_it(call: str, lost: bool) -> None:
    clock = ManualClock()
    memory, hub = MemoryBackend(MemoryHub(clock)), MemoryHub(clock)
    broker, backend = FlakyBroker(MemoryBroker(hub)), FlakyBackend(memory)
    dying, other = TwoStores(broker, backend, clock), TwoStores(MemoryBroker(hub), memory, clock)
    (broker if call == "put" else backend).faults.next_call(call, lose_reply=lost)
    with pytest.raises((BrokerUnavailable, BackendUnavailable, PublishUnknown)):
        claim(dying, "a", None, b"1", "t")

    assert not claim(other, "a", None, b"2", "u")
    clock.advance(6.0)
    other.tend()

    assert set(drain(other, "q")) == {"t"}  # twice at most on the queue; the second is known as done, by its UUID
    assert memory.unsent(9, older_than=0.0) == []


def test_a_backend_that_keeps_no_claims_refuses() -> None:
    backend = NullBackend(ManualClock())
    assert not backend.features.claims
    with pytest.raises(Unsupported, match="the null backend keeps no keys of unique tasks"):
        backend.claims(["a"])
    with pytest.raises(Unsupported, match="the null backend keeps no keys of unique tasks"):
        backend.release([("a", b"")])
