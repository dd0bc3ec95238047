"""Limits in a Redis Cluster when one node is away."""

from __future__ import annotations

import pytest

from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.errors import BackendUnavailable
from machinery_py.limits.redis import ClusterLimits
from machinery_py.testing.conformance.limits import LEASE, ONE
from tests.stores.redis_cluster.case import ClusterClock, clock, open_cluster
from tests.support.servers import RedisCluster as ClusterServers

__all__ = ["clock", "open_cluster"]


def test_node_that_is_away_leaves_the_slots_of_others(
    empty_cluster: ClusterServers, clock: ClusterClock
) -> None:
    cluster = RedisClusterDriver(empty_cluster.url, clock=clock, timeout=1.0)
    limits = ClusterLimits(cluster)
    scopes = ["a", "b", "c", "d"]
    nodes = [empty_cluster.node_of(scope) for scope in scopes]
    assert len(set(map(id, nodes))) > 1
    held = [limits.enter(scope, "who", "token", [ONE], ttl=LEASE).held[0] for scope in scopes]
    assert limits.renew(held, ttl=LEASE) == [True] * 4  # each node has the script

    for node in empty_cluster.nodes:  # so that no replica takes over meanwhile
        node.cli("CONFIG", "SET", "cluster-node-timeout", 60_000)
    nodes[0].freeze()
    try:
        renewed = limits.renew(held, ttl=LEASE)
        with pytest.raises(BackendUnavailable):
            limits.renew(held[:1], ttl=LEASE)
        with pytest.raises(BackendUnavailable):
            limits.leave(held)
    finally:
        nodes[0].thaw()
        for node in empty_cluster.nodes:
            node.cli("CONFIG", "SET", "cluster-node-timeout", 1000)

    assert renewed == [None if node is nodes[0] else True for node in nodes]
    for scope, node in zip(scopes, nodes, strict=True):
        if node is not nodes[0]:
            assert limits.enter(scope, "next", "other", [ONE], ttl=LEASE).wait == 0.0
    cluster.close()
