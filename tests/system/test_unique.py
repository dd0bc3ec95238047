"""Unique and exclusive tasks over pairs of stores, with real workers in threads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.exclusive import ExclusiveConformance
from machinery_py.testing.conformance.unique import UniqueConformance
from machinery_py.testing.servers import MemcachedServer, RedisCluster
from tests.stores.memcache_case import empty_memcached
from tests.stores.mongo_case import mongodb_server, mongodb_url
from tests.stores.redis_case import redis_server, redis_url
from tests.stores.redis_cluster_case import empty_cluster, url_of

__all__ = ["empty_cluster", "empty_memcached", "mongodb_server", "mongodb_url", "redis_server", "redis_url"]

_numbers = itertools.count(1)


class Unique(UniqueConformance, ExclusiveConformance):
    pass


def memory() -> str:
    # A name, so that a second Server finds the same store.
    return f"memory://unique-{next(_numbers)}"


class TestMemory(Unique):
    @pytest.fixture
    def server(self) -> Server:
        return Server(Config(broker=memory()))


class TestSQLite(Unique):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(Config(broker=f"sqlite:///{tmp_path}/store.db?synchronous=normal"))


class TestRedis(Unique):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url))


class TestMemoryBrokerAndSQLiteBackend(Unique):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(Config(broker=memory(), result_backend=f"sqlite:///{tmp_path}/store.db?synchronous=normal"))


class TestRedisBrokerAndMemoryBackend(Unique):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url, result_backend=memory()))


class TestMemoryBrokerAndRedisBackend(Unique):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=memory(), result_backend=redis_url))


class TestMongo(Unique):
    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestRedisCluster(Unique):
    @pytest.fixture
    def server(self, empty_cluster: RedisCluster) -> Server:
        return Server(Config(broker=url_of(empty_cluster)))


class TestMemoryBrokerAndMongoBackend(UniqueConformance):
    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=memory(), result_backend=mongodb_url))


class TestMemoryBrokerAndMemcacheBackend(UniqueConformance):
    @pytest.fixture
    def server(self, empty_memcached: MemcachedServer) -> Server:
        return Server(Config(broker=memory(), result_backend=empty_memcached.url))
