"""A private cluster, and a clock that moves its time, for tests of the Redis Cluster stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.testing.clocks import ManualClock
from tests.stores.redis.case import AGE
from tests.support.servers import RedisCluster as ClusterServers


class ClusterClock(ManualClock):
    """As ServerClock, for each master."""

    def __init__(self, cluster: ClusterServers) -> None:
        super().__init__()
        self._cluster = cluster

    def advance(self, seconds: float = 0.0, **more: float) -> None:
        before = self.now()
        super().advance(seconds, **more)
        passed = (self.now() - before).total_seconds()
        for node in self._cluster.masters:
            node.cli("EVAL", AGE, 0, round(passed * 1000))


class Clusters:
    """Each call opens connections of its own, as another process would."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self._url = url
        self._clock = clock
        self._open: list[RedisClusterDriver] = []

    def __call__(self) -> RedisClusterDriver:
        cluster = RedisClusterDriver(self._url, clock=self._clock)
        self._open.append(cluster)
        return cluster

    def close(self) -> None:
        for cluster in self._open:
            cluster.close()


@pytest.fixture
def clock(empty_cluster: ClusterServers) -> ClusterClock:
    return ClusterClock(empty_cluster)


@pytest.fixture
def open_cluster(empty_cluster: ClusterServers, clock: ClusterClock) -> Iterator[Clusters]:
    clusters = Clusters(empty_cluster.url, clock)
    yield clusters
    clusters.close()
