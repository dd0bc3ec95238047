"""Whole applications over one MongoDB, and over MongoDB beside Redis, with real workers in threads."""

from __future__ import annotations

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.workflows import WorkflowConformance
from tests.stores.mongo_case import mongodb_server, mongodb_url

__all__ = ["mongodb_server", "mongodb_url"]


class TestMongo(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestMongoBrokerAndRedisBackend(WorkflowConformance):
    LONG = 100

    # Its callback is published twice, with one UUID, if the duplicate comes before the first outbox is cleared: at least once.
    test_a_message_that_comes_twice_counts_once = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, mongodb_url: str, empty_redis: object) -> Server:
        return Server(Config(broker=mongodb_url, result_backend=empty_redis.url))  # type: ignore[attr-defined]


class TestRedisBrokerAndMongoBackend(WorkflowConformance):
    LONG = 100

    test_a_message_that_comes_twice_counts_once = None  # type: ignore[assignment]  # as above

    @pytest.fixture
    def server(self, mongodb_url: str, empty_redis: object) -> Server:
        return Server(Config(broker=empty_redis.url, result_backend=mongodb_url))  # type: ignore[attr-defined]
