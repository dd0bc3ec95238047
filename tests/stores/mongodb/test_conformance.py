"""The contracts over one MongoDB. A consumer dies by missing its beats, at two looks."""

from __future__ import annotations

import os

import pytest

from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.limits.mongodb import MongoLimits
from machinery_py.locks.mongodb import MongoLock
from machinery_py.stores.base import Store
from machinery_py.stores.mongodb import MongoStore
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.checkpoints import CheckpointConformance
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
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
    MANY = 10_000 if os.environ.get("MACHINERY_TEST_FULL") else 1_000  # the stand-in is slow

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


class TestMongoCheckpoints(MongoStores, CheckpointConformance):
    pass


class TestMongoStore(MongoStores, SettlementConformance):
    pass


class TestMongoSchedules(MongoStores, ScheduleConformance):
    pass


class TestMongoClaims(MongoStores, ClaimConformance):
    pass


class TestMongoLock(LockConformance):
    @pytest.fixture
    def open_lock(self, open_driver: Drivers) -> OpenLock:
        return lambda: MongoLock(open_driver())


class TestMongoLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, open_driver: Drivers) -> OpenLimits:
        return lambda: MongoLimits(open_driver())
