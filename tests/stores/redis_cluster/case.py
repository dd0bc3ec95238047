"""What the tests of the Redis Cluster stores share: a private cluster, and a clock that moves its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import wait_until
from tests.stores.redis.case import AGE
from tests.support.servers import RedisCluster as ClusterServers
from tests.support.servers import RedisServer


def masters(cluster: ClusterServers) -> list[RedisServer]:
    return [
        node
        for node in cluster.nodes
        if node.is_running and str(node.cli("ROLE")).startswith("['master'")
    ]


def url_of(cluster: ClusterServers) -> str:
    return "redis://" + ",".join(f"{host}:{port}" for host, port in cluster.addresses)


class ClusterClock(ManualClock):
    """As ServerClock, for each master."""

    def __init__(self, cluster: ClusterServers) -> None:
        super().__init__()
        self._cluster = cluster

    def advance(self, seconds: float = 0.0, **more: float) -> None:
        before = self.now()
        super().advance(seconds, **more)
        passed = (self.now() - before).total_seconds()
        for node in masters(self._cluster):
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
def empty_cluster(redis_cluster: ClusterServers) -> ClusterServers:
    """The shared cluster, complete and without a key."""
    redis_cluster.start()
    for node in masters(redis_cluster):
        wait_until(lambda node=node: node.cli("FLUSHALL") == "OK")
        node.cli("SCRIPT", "FLUSH")
    return redis_cluster


@pytest.fixture
def clock(empty_cluster: ClusterServers) -> ClusterClock:
    return ClusterClock(empty_cluster)


@pytest.fixture
def open_cluster(empty_cluster: ClusterServers, clock: ClusterClock) -> Iterator[Clusters]:
    clusters = Clusters(url_of(empty_cluster), clock)
    yield clusters
    clusters.close()
