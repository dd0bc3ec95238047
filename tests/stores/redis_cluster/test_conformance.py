"""The contracts over a Redis Cluster of three masters, each with a replica: those of one Redis."""

from __future__ import annotations

from tests.stores.redis import test_conformance as one
from tests.stores.redis_cluster.case import InCluster


class TestClusterBroker(InCluster, one.TestRedisBroker):
    pass


class TestClusterBackend(InCluster, one.TestRedisBackend):
    pass


class TestClusterStore(InCluster, one.TestRedisStore):
    pass


class TestClusterSchedules(InCluster, one.TestRedisSchedules):
    pass


class TestClusterClaims(InCluster, one.TestRedisClaims):
    pass


class TestClusterCheckpoints(InCluster, one.TestRedisCheckpoints):
    pass


class TestClusterLock(InCluster, one.TestRedisLock):
    pass


class TestClusterLimits(InCluster, one.TestRedisLimits):
    pass


class TestChordsThatAreLeftBehindInACluster(InCluster, one.TestChordsThatAreLeftBehindInRedis):
    pass
