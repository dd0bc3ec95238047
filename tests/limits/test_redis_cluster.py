"""The contract of limits over a Redis Cluster."""

from __future__ import annotations

import pytest

from machinery_py.limits.redis import ClusterLimits
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from tests.stores.redis_cluster.case import ClusterClock, Clusters, clock, open_cluster
from tests.support.servers import RedisCluster as ClusterServers

__all__ = ["clock", "open_cluster"]


class TestClusterLimits(LimitsConformance):
    @pytest.fixture
    def clock(self, empty_cluster: ClusterServers) -> ClusterClock:
        return ClusterClock(empty_cluster)

    @pytest.fixture
    def open_limits(self, open_cluster: Clusters) -> OpenLimits:
        return lambda: ClusterLimits(open_cluster())
