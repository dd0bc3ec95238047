"""The contracts over one Redis. A consumer dies by missing its beats, at two looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from machinery_py.backends.redis import RedisBackend
from machinery_py.brokers.redis import RedisBroker
from machinery_py.settlement.base import Store
from machinery_py.settlement.redis_store import RedisStore
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.stores.redis_case import Drivers, ServerClock, clock, open_driver, redis_server, redis_url

__all__ = ["clock", "open_driver", "redis_server", "redis_url"]


class TestRedisBroker(BrokerConformance):
    @pytest.fixture
    def clock(self, redis_url: str) -> Iterator[ServerClock]:
        with closing(ServerClock(redis_url)) as clock:
            yield clock

    @pytest.fixture
    def open_broker(self, open_driver: Drivers) -> OpenBroker:
        return lambda: RedisBroker(open_driver())


class TestRedisBackend(BackendConformance):
    @pytest.fixture
    def clock(self, redis_url: str) -> Iterator[ServerClock]:
        with closing(ServerClock(redis_url)) as clock:
            yield clock

    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: RedisBackend(open_driver(), expire_in=self.expire_in)


class TestRedisStore(SettlementConformance):
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
