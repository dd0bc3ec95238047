"""Whole applications over one MongoDB, and over MongoDB beside Redis, with real workers in threads.

Beside Redis `make chaos` and `make matrix` run all of it; otherwise what goes on between the two: single tasks, chains,
groups and chords. What concerns one broker alone (queues, weights, workers) is the same with it and other backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.workflows import LinkedConformance, WorkflowConformance
from tests.stores.mongodb.case import mongodb_server, mongodb_url
from tests.stores.pair_case import ALL_PAIRS

__all__ = ["mongodb_server", "mongodb_url"]

if TYPE_CHECKING:
    Mixed = WorkflowConformance
else:
    Mixed = WorkflowConformance if ALL_PAIRS else LinkedConformance


class TestMongo(WorkflowConformance):
    LONG = 60

    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestMongoBrokerAndRedisBackend(Mixed):
    LONG = 60

    @pytest.fixture
    def server(self, mongodb_url: str, empty_redis: object) -> Server:
        return Server(Config(broker=mongodb_url, result_backend=empty_redis.url))  # type: ignore[attr-defined]


class TestRedisBrokerAndMongoBackend(Mixed):
    LONG = 60

    @pytest.fixture
    def server(self, mongodb_url: str, empty_redis: object) -> Server:
        return Server(Config(broker=empty_redis.url, result_backend=mongodb_url))  # type: ignore[attr-defined]
