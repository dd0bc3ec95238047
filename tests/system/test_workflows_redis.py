"""Whole applications over one Redis, with real workers in threads."""

from __future__ import annotations

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.workflows import WorkflowConformance
from tests.stores.redis_case import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


class TestRedis(WorkflowConformance):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url))


class TestRedisBrokerAndMemoryBackend(WorkflowConformance):
    LONG = 300

    # Its callback is published twice, with one UUID, if the duplicate comes before the first outbox is cleared: at least once.
    test_a_message_that_comes_twice_counts_once = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url, result_backend="memory://redis-workflows"))
