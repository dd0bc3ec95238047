"""Batches over stores and pairs of them, with real workers in threads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.batches import BatchConformance
from tests.support.servers import RedisCluster

_numbers = itertools.count(1)


class TestMemory(BatchConformance):
    @pytest.fixture
    def server(self) -> Server:
        return Server(Config(broker=f"memory://batches-of-all-{next(_numbers)}"))


class TestSQLite(BatchConformance):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(Config(broker=f"sqlite:///{tmp_path}/store.db?synchronous=normal"))


class TestPostgreSQL(BatchConformance):
    @pytest.fixture
    def server(self, postgres_url: str) -> Server:
        return Server(Config(broker=postgres_url))


class TestRedis(BatchConformance):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url))


class TestMongo(BatchConformance):
    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestRedisCluster(BatchConformance):
    @pytest.fixture
    def server(self, empty_cluster: RedisCluster) -> Server:
        return Server(Config(broker=empty_cluster.url))


class TestAMQP(BatchConformance):
    @pytest.fixture
    def server(self, amqp_url: str) -> Server:
        return Server(Config(broker=amqp_url))


class TestAMQPBrokerAndRedisBackend(BatchConformance):
    @pytest.fixture
    def server(self, amqp_url: str, redis_url: str) -> Server:
        return Server(Config(broker=amqp_url, result_backend=redis_url))
