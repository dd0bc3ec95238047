"""Whole applications over a Redis Cluster, with real workers in threads."""

from __future__ import annotations

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.workflows import WorkflowConformance
from tests.stores.redis_cluster.case import empty_cluster, url_of
from tests.support.servers import RedisCluster

__all__ = ["empty_cluster"]


class TestRedisCluster(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(self, empty_cluster: RedisCluster) -> Server:
        return Server(Config(broker=url_of(empty_cluster)))
