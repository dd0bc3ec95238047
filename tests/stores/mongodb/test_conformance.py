"""The contracts over one MongoDB. A consumer dies by missing its beats, at two looks."""

from __future__ import annotations

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.locks.mongodb import MongoLock
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Store
from machinery_py.stores.mongodb import MongoStore
from machinery_py.stores.outbox import TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.locks import LockConformance, OpenLock
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.stores.left_behind import LeftBehind
from tests.stores.mongodb.case import Drivers, clock, open_driver

__all__ = ["clock", "open_driver"]


class TestMongoBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_driver: Drivers) -> OpenBroker:
        return lambda: MongoBroker(open_driver())


class TestMongoBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: MongoBackend(open_driver(), expire_in=self.expire_in)


class TestChordsThatAreLeftBehindInMongo(LeftBehind):
    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: MongoBackend(open_driver())


class MongoStores:
    @pytest.fixture
    def open_store(self, open_driver: Drivers) -> OpenStore:
        def open_store() -> Store:
            driver = open_driver()
            return MongoStore(MongoBroker(driver), MongoBackend(driver))

        return open_store


class TestMongoStore(MongoStores, SettlementConformance):
    pass


class TestMongoSchedules(MongoStores, ScheduleConformance):
    pass


class TestSchedulesInMongoBesideAnotherBroker(ScheduleConformance):
    @pytest.fixture
    def open_store(self, open_driver: Drivers, clock: ManualClock) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, MongoBackend(open_driver()), clock)


class TestMongoClaims(MongoStores, ClaimConformance):
    pass


class TestClaimsInMongoBesideAnotherBroker(ClaimConformance):
    @pytest.fixture
    def open_store(self, open_driver: Drivers, clock: ManualClock) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, MongoBackend(open_driver()), clock)


class TestMongoLock(LockConformance):
    @pytest.fixture
    def open_lock(self, open_driver: Drivers) -> OpenLock:
        return lambda: MongoLock(open_driver())


class TestMongoBrokerAndMemoryBackend(SettlementConformance):
    @pytest.fixture
    def open_store(self, open_driver: Drivers, clock: ManualClock) -> OpenStore:
        backend = MemoryBackend(MemoryRows(clock))
        return lambda: TwoStores(MongoBroker(open_driver()), backend, clock)


class TestMemoryBrokerAndMongoBackend(SettlementConformance):
    @pytest.fixture
    def open_store(self, open_driver: Drivers, clock: ManualClock) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, MongoBackend(open_driver()), clock)
