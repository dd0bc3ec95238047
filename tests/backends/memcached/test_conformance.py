"""The backend contracts over memcached: alone, over two servers, as the second of two stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
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
