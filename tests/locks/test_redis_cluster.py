"""Go's locks in a Redis Cluster."""

from __future__ import annotations

import pytest

from machinery_py.locks.redis import ClusterLock
from machinery_py.testing.waiting import together
from tests.stores.redis_cluster.case import ClusterClock, Clusters, clock, open_cluster
from tests.support.servers import RedisCluster as ClusterServers

__all__ = ["clock", "open_cluster"]


def nanoseconds(clock: ClusterClock) -> int:
    return round(clock.now().timestamp() * 1e6) * 1000


@pytest.mark.parametrize(
    "key", ["machinery_lock_worker*/5 * * * *", "machinery_lock_{a}", "}{", "machinery_lock_ü{}"]
)
def test_a_lock_of_go_is_a_key_in_its_slot(
    empty_cluster: ClusterServers, open_cluster: Clusters, clock: ClusterClock, key: str
) -> None:
    go = ClusterLock(open_cluster()).go()
    until = nanoseconds(clock) + 5_500_000_000

    assert together(8, lambda _: ClusterLock(open_cluster()).go().lock(key, until)).count(True) == 1
    node = empty_cluster.node_of(key)
    assert node.cli("GET", key) == str(until - 1)
    assert 0 < int(str(node.cli("PTTL", key))) <= 5500

    clock.advance(6.0)
    assert go.lock(key, nanoseconds(clock) + 10**9)
    assert not go.lock_with_retries(key, nanoseconds(clock) + 10**9)
