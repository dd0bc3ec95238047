"""The backend contracts over memcached: alone, over two servers, as the second of two stores."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import pytest

from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.sqlite.broker import SQLiteBroker, SQLiteConsumer
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Session, Store
from machinery_py.stores.outbox import TwoSession, TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.backends.memcached.case import Drivers, ServerClock, clock, open_driver
from tests.support.servers import MemcachedServer, require

__all__ = ["clock", "open_driver"]


class TestMemcacheBackend(BackendConformance):
    @pytest.fixture
    def clock(self, empty_memcached: MemcachedServer) -> ServerClock:
        return ServerClock(empty_memcached)

    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: MemcacheBackend(open_driver(), expire_in=self.expire_in)


@pytest.fixture(scope="module")
def two_more() -> Iterator[list[MemcachedServer]]:
    require(MemcachedServer)
    with MemcachedServer() as one, MemcachedServer() as two:
        yield [one, two]


class TestThreeMemcachedServers(BackendConformance):
    @pytest.fixture
    def clock(
        self, empty_memcached: MemcachedServer, two_more: list[MemcachedServer]
    ) -> ServerClock:
        for server in two_more:
            server.flush()
        return ServerClock(empty_memcached, *two_more)

    @pytest.fixture
    def open_backend(self, clock: ServerClock) -> Iterator[OpenBackend]:
        drivers = Drivers(clock)
        yield lambda: MemcacheBackend(drivers(), expire_in=self.expire_in)
        drivers.close()


class TestMemoryBrokerAndMemcacheBackend(SettlementConformance):
    @pytest.fixture
    def clock(self, empty_memcached: MemcachedServer) -> ServerClock:
        return ServerClock(empty_memcached)

    @pytest.fixture
    def open_store(self, clock: ServerClock, open_driver: Drivers) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, MemcacheBackend(open_driver()), clock)


class TestSQLiteBrokerAndMemcacheBackend(SettlementConformance):
    @pytest.fixture
    def clock(self, empty_memcached: MemcachedServer) -> ServerClock:
        return ServerClock(empty_memcached)

    @pytest.fixture
    def open_store(
        self, clock: ServerClock, open_driver: Drivers, tmp_path: pathlib.Path
    ) -> Iterator[OpenStore]:
        driver = SQLiteDriver(str(tmp_path / "messages.db"), clock=clock, synchronous="NORMAL")
        yield lambda: TwoStores(SQLiteBroker(driver), MemcacheBackend(open_driver()), clock)
        driver.close()

    def crash_session(
        self, store: Store, session: Session, clock: ManualClock, survivors: Sequence[Session] = ()
    ) -> None:
        assert isinstance(session, TwoSession)
        assert isinstance(session.consumer, SQLiteConsumer)
        session.consumer.abandon()
        store.tend()


class BesideMemory:
    @pytest.fixture
    def clock(self, empty_memcached: MemcachedServer) -> ServerClock:
        return ServerClock(empty_memcached)

    @pytest.fixture
    def open_store(self, clock: ServerClock, open_driver: Drivers) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, MemcacheBackend(open_driver()), clock)


class TestSchedulesInMemcache(BesideMemory, ScheduleConformance):
    pass


class TestClaimsInMemcache(BesideMemory, ClaimConformance):
    pass
