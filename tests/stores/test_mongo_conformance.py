"""The contracts over one MongoDB. A consumer dies by missing its beats, at two looks."""

from __future__ import annotations

import pytest

from machinery_py.backends.mongo import MongoBackend
from machinery_py.brokers.mongo import MongoBroker
from machinery_py.settlement.base import Store
from machinery_py.settlement.mongo_store import MongoStore
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.stores.mongo_case import Drivers, clock, mongodb_server, mongodb_url, open_driver

__all__ = ["clock", "mongodb_server", "mongodb_url", "open_driver"]


class TestMongoBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_driver: Drivers) -> OpenBroker:
        return lambda: MongoBroker(open_driver())


class TestMongoBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: MongoBackend(open_driver(), expire_in=self.expire_in)


class TestMongoStore(SettlementConformance):
    @pytest.fixture
    def open_store(self, open_driver: Drivers) -> OpenStore:
        def open_store() -> Store:
            driver = open_driver()
            return MongoStore(MongoBroker(driver), MongoBackend(driver))

        return open_store
