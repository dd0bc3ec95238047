"""Whole applications with results in memcached, over brokers of every kind, with real workers in threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.workflows import WorkflowConformance
from tests.backends.memcached.case import empty_memcached
from tests.support.servers import MemcachedServer, RedisServer

__all__ = ["empty_memcached"]


class Workflows(WorkflowConformance):
    LONG = 300
    __test__ = False


class TestMemoryBrokerAndMemcacheBackend(Workflows):
    __test__ = True

    @pytest.fixture
    def server(self, empty_memcached: MemcachedServer, request: pytest.FixtureRequest) -> Server:
        return Server(
            Config(
                broker=f"memory://memcache-{abs(hash(request.node.name))}",
                result_backend=empty_memcached.url,
            )
        )


class TestSQLiteBrokerAndMemcacheBackend(Workflows):
    __test__ = True

    @pytest.fixture
    def server(self, empty_memcached: MemcachedServer, tmp_path: Path) -> Server:
        broker = f"sqlite:///{tmp_path}/store.db?synchronous=normal"
        return Server(Config(broker=broker, result_backend=empty_memcached.url))


class TestRedisBrokerAndTwoMemcachedServers(Workflows):
    __test__ = True

    @pytest.fixture
    def server(
        self, empty_redis: RedisServer, empty_memcached: MemcachedServer
    ) -> Iterator[Server]:
        with MemcachedServer() as other:
            result_backend = f"{empty_memcached.url},127.0.0.1:{other.port}"
            yield Server(Config(broker=empty_redis.url, result_backend=result_backend))
