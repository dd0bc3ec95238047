"""Whole applications over one MongoDB, and over MongoDB beside Redis, with real workers in threads.

Beside Redis `make chaos` runs all of it (MACHINERY_TEST_FULL=1); otherwise what goes on between the two: single tasks, chains,
groups and chords. What concerns one broker alone (queues, weights, workers) is the same with it and other backends.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.workflows import LinkedConformance, WorkflowConformance
from tests.stores.mongo_case import mongodb_server, mongodb_url

__all__ = ["mongodb_server", "mongodb_url"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
if TYPE_CHECKING:
    Mixed = WorkflowConformance
else:
    Mixed = WorkflowConformance if FULL else LinkedConformance


class TestMongo(WorkflowConformance):
    LONG = 300 if FULL else 100

    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestMongoBrokerAndRedisBackend(Mixed):
    LONG = 60

    # Its callback is published twice, with one UUID, if the duplicate comes before the first outbox is cleared: at least once.
    test_a_message_that_comes_twice_counts_once = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, mongodb_url: str, empty_redis: object) -> Server:
        return Server(Config(broker=mongodb_url, result_backend=empty_redis.url))  # type: ignore[attr-defined]


class TestRedisBrokerAndMongoBackend(Mixed):
    LONG = 60

    test_a_message_that_comes_twice_counts_once = None  # type: ignore[assignment]  # as above

    @pytest.fixture
    def server(self, mongodb_url: str, empty_redis: object) -> Server:
        return Server(Config(broker=empty_redis.url, result_backend=mongodb_url))  # type: ignore[attr-defined]
