"""Whole applications over one Redis, with real workers in threads."""

from __future__ import annotations

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.workflows import WorkflowConformance
from tests.stores.redis.case import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


class TestRedis(WorkflowConformance):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url))


class TestRedisBrokerAndMemoryBackend(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url, result_backend="memory://redis-workflows"))
