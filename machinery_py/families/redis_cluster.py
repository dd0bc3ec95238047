"""`redis://h1,h2,h3`, or one host and `redis.cluster_mode`: a Redis Cluster, 6.2 or newer."""

from __future__ import annotations

from machinery_py._drivers.redis_cluster import RedisCluster
from machinery_py.backends.redis_cluster import ClusterBackend
from machinery_py.brokers.redis_cluster import ClusterBroker
from machinery_py.families.base import Family, FamilyOptions
from machinery_py.locks.redis_cluster import ClusterLock
from machinery_py.settlement.redis_cluster_store import ClusterStore


class RedisClusterFamily(Family):
    """Stores in one cluster, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._cluster = RedisCluster(
            url, clock=options.clock, timeout=options.timeout, client_name=options.redis.client_name or "machinery"
        )

    def broker(self) -> ClusterBroker:
        return ClusterBroker(self._cluster, lease=self.options.lease)

    def backend(self) -> ClusterBackend:
        return ClusterBackend(self._cluster, expire_in=self.options.expire_in)

    def lock(self) -> ClusterLock:
        return ClusterLock(self._cluster)

    def together(self) -> ClusterStore:
        return ClusterStore(self.broker(), self.backend(), self.options.clock)

    def close(self) -> None:
        self._cluster.close()
