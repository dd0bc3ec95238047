"""`redis://h1,h2,h3`, or one host and `redis.cluster_mode`: a Redis Cluster, 6.2 or newer."""

from __future__ import annotations

import math

from machinery_py.backends.redis.cluster import ClusterBackend
from machinery_py.brokers.redis.cluster import ClusterBroker
from machinery_py.config.sections import RedisConfig
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.pool import Limits
from machinery_py.locks.redis_cluster import ClusterLock
from machinery_py.stores.family import Family, FamilyOptions
from machinery_py.stores.redis_cluster_store import ClusterStore


class RedisClusterFamily(Family):
    """Stores in one cluster, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        redis = options.redis
        self._cluster = RedisClusterDriver(
            url,
            clock=options.clock,
            timeout=options.timeout,
            connect_timeout=redis.connect_timeout or math.inf,
            client_name=redis.client_name or "machinery",
            strict=options.strict_durability,
            limits=limits_of(redis),
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


def limits_of(redis: RedisConfig) -> Limits:
    """Go's 0 is no limit."""
    return Limits(
        max_idle=redis.max_idle,
        max_active=redis.max_active,
        wait=redis.wait,
        idle_timeout=redis.max_idle_timeout or math.inf,
        read=redis.read_timeout or math.inf,
        write=redis.write_timeout or math.inf,
        block=redis.normal_tasks_poll_period / 1000,
        delayed_key=redis.delayed_tasks_key,
    )
