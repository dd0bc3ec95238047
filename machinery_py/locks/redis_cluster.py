"""Locks in a Redis Cluster: each name is in a slot of its own, with a count of its own for the fence.

Limits: as on one Redis; a replica that takes over may not know of a lock yet.
"""

from __future__ import annotations

import msgspec

from machinery_py._drivers.redis_cluster import RedisCluster, SlotDriver
from machinery_py._drivers.redis_slots import quoted
from machinery_py.locks.base import Held, Lock
from machinery_py.locks.redis import RedisLock


class ClusterLock(Lock):
    """Keys in a cluster, which belongs to whoever made it."""

    def __init__(self, cluster: RedisCluster) -> None:
        self._cluster = cluster

    def _at(self, name: str) -> RedisLock:
        return RedisLock(SlotDriver(self._cluster, f"mpy:{{{quoted(name)}}}:".encode()))

    def acquire(self, name: str, *, ttl: float) -> Held | None:
        held = self._at(name).acquire(quoted(name), ttl=ttl)
        return None if held is None else msgspec.structs.replace(held, name=name)

    def renew(self, held: Held, *, ttl: float) -> bool:
        return self._at(held.name).renew(msgspec.structs.replace(held, name=quoted(held.name)), ttl=ttl)

    def release(self, held: Held) -> bool:
        return self._at(held.name).release(msgspec.structs.replace(held, name=quoted(held.name)))

    def close(self) -> None:
        pass  # the cluster belongs to whoever made it
