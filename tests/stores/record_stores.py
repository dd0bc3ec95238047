"""Stores for the conformance suites of schedules and claims: each class opens one kind."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import closing

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Store
from machinery_py.stores.outbox import TwoStores
from machinery_py.stores.redis import RedisStore
from machinery_py.stores.rows import RowsStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fencing import OpenStore
from tests.stores.redis.case import Drivers, ServerClock


class InMemory:
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        hub = MemoryRows(clock)
        broker, backend = MemoryBroker(hub), MemoryBackend(hub)
        return lambda: RowsStore(broker, backend)


class InSQLite:
    @pytest.fixture
    def open_store(self, clock: ManualClock, tmp_path: pathlib.Path) -> Iterator[OpenStore]:
        drivers: list[SQLiteDriver] = []

        def open_store() -> Store:
            driver = SQLiteDriver(tmp_path / "machinery.db", clock=clock, synchronous="NORMAL")
            drivers.append(driver)
            return RowsStore(SQLiteBroker(driver), SQLiteBackend(driver))

        yield open_store
        for driver in drivers:
            driver.close()


class RedisTime:
    @pytest.fixture
    def clock(self, redis_url: str) -> Iterator[ServerClock]:
        with closing(ServerClock(redis_url)) as clock:
            yield clock


class InRedis(RedisTime):
    @pytest.fixture
    def open_store(self, open_driver: Drivers) -> OpenStore:
        def open_store() -> Store:
            driver = open_driver()
            return RedisStore(RedisBroker(driver), RedisBackend(driver))

        return open_store


class InTwoMemories:
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        broker, backend = MemoryBroker(MemoryRows(clock)), MemoryBackend(MemoryRows(clock))
        return lambda: TwoStores(broker, backend, clock)


class InRedisBesideMemory(RedisTime):
    @pytest.fixture
    def open_store(self, open_driver: Drivers, clock: ServerClock) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, RedisBackend(open_driver()), clock)


class InSQLiteBesideMemory:
    @pytest.fixture
    def open_store(self, clock: ManualClock, tmp_path: pathlib.Path) -> Iterator[OpenStore]:
        broker, drivers = MemoryBroker(MemoryRows(clock)), list[SQLiteDriver]()

        def open_store() -> Store:
            drivers.append(SQLiteDriver(tmp_path / "states.db", clock=clock))
            return TwoStores(broker, SQLiteBackend(drivers[-1]), clock)

        yield open_store
        for driver in drivers:
            driver.close()
