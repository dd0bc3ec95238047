"""Unique and exclusive tasks over pairs of stores, with real workers in threads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.exclusive import ExclusiveConformance
from machinery_py.testing.conformance.unique import UniqueConformance
from tests.stores.redis_case import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

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
