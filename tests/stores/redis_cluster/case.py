"""A private cluster, and a clock that moves its time, for tests of the Redis stores in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.connections.redis.cluster import ClusterDriver
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


class ClusterDrivers:
    """Each call opens connections of its own, as another process would."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.url = url
        self._clock = clock
        self._open: list[ClusterDriver] = []

    def __call__(self) -> ClusterDriver:
        driver = ClusterDriver(self.url, clock=self._clock)
        self._open.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._open:
            driver.close()


class InCluster:
    """Takes the place of one Redis in the classes that test its stores."""

    @pytest.fixture
    def clock(self, empty_cluster: ClusterServers) -> ClusterClock:
        return ClusterClock(empty_cluster)

    @pytest.fixture
    def open_driver(
        self, empty_cluster: ClusterServers, clock: ClusterClock
    ) -> Iterator[ClusterDrivers]:
        drivers = ClusterDrivers(empty_cluster.url, clock)
        yield drivers
        drivers.close()
