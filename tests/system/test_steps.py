"""Steps of tasks over stores and pairs of stores, with real workers in threads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.awaited_results import AwaitedResultConformance
from machinery_py.testing.conformance.signals import NoSignalConformance, SignalConformance
from machinery_py.testing.conformance.steps import StepConformance

_numbers = itertools.count(1)


def memory() -> str:
    return f"memory://steps-{next(_numbers)}"


class TestMemory(StepConformance, SignalConformance, AwaitedResultConformance):
    @pytest.fixture
    def server(self) -> Server:
        return Server(Config(broker=memory()))


class TestSQLite(StepConformance, SignalConformance, AwaitedResultConformance):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(Config(broker=f"sqlite:///{tmp_path}/store.db?synchronous=normal"))


class TestPostgreSQL(StepConformance, SignalConformance, AwaitedResultConformance):
    @pytest.fixture
    def server(self, postgres_url: str) -> Server:
        return Server(Config(broker=postgres_url))


class TestRedis(StepConformance, SignalConformance, AwaitedResultConformance):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url))


class TestMongo(StepConformance, NoSignalConformance):
    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestRabbitMQBrokerAndRedisBackend(
    StepConformance, SignalConformance, AwaitedResultConformance
):
    @pytest.fixture
    def server(self, amqp_url: str, redis_url: str) -> Server:
        return Server(Config(broker=amqp_url, result_backend=redis_url))


class TestRedisBrokerAndMongoBackend(StepConformance, NoSignalConformance):
    @pytest.fixture
    def server(self, redis_url: str, mongodb_url: str) -> Server:
        return Server(Config(broker=redis_url, result_backend=mongodb_url))


class TestMemoryBrokerAndSQLiteBackend(
    StepConformance, SignalConformance, AwaitedResultConformance
):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        results = f"sqlite:///{tmp_path}/store.db?synchronous=normal"
        return Server(Config(broker=memory(), result_backend=results))
