"""Locks in a Redis Cluster: each name is in a slot of its own, with its last fence.

    mpy:lock:{<name>}     as on one Redis
    mpy:fence:{<name>}    the last fence of the name, for a day longer than the lock

Limits: as on one Redis; a replica that takes over may not know of a lock yet.
"""

from __future__ import annotations

import datetime as dt
import secrets

import msgspec

from machinery_py.connections.redis.cluster import RedisClusterDriver, SlotDriver
from machinery_py.connections.redis.scripts import Folder, pack
from machinery_py.connections.redis.slots import quoted
from machinery_py.locks.base import GoLock, Lock, LockHolding
from machinery_py.locks.redis import RedisGoLock, RedisLock

FENCE_LIFE = 86_400_000  # ms beyond the lock; a clock that is set back by more than this gives a smaller fence

_ACQUIRE = Folder("locks/lua/cluster").script("acquire", FENCE_LIFE=FENCE_LIFE)


class ClusterLock(Lock):
    """Keys in a cluster, which belongs to whoever made it."""

    def __init__(self, cluster: RedisClusterDriver) -> None:
        self._cluster = cluster

    def _at(self, name: str) -> SlotDriver:
        return SlotDriver(self._cluster, f"mpy:{{{quoted(name)}}}:".encode())

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token = secrets.token_hex(16)
        expires_at = self._cluster.clock.now() + dt.timedelta(seconds=ttl)
        argument = pack((self._cluster.now(), quoted(name), token, max(1, int(ttl * 1000))))
        fence = self._at(name).run(_ACQUIRE, argument, doing="taking a lock")
        return (
            None
            if fence is None
            else LockHolding(name=name, token=token, fence=fence, expires_at=expires_at)
        )

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        return RedisLock(self._at(held.name)).renew(
            msgspec.structs.replace(held, name=quoted(held.name)), ttl=ttl
        )

    def release(self, held: LockHolding) -> bool:
        return RedisLock(self._at(held.name)).release(
            msgspec.structs.replace(held, name=quoted(held.name))
        )

    def go(self) -> ClusterGoLock:
        return ClusterGoLock(self._cluster)

    def close(self) -> None:
        pass  # the cluster belongs to whoever made it


class ClusterGoLock(GoLock):
    """Go's keys, each in its slot."""

    def __init__(self, cluster: RedisClusterDriver) -> None:
        self._cluster = cluster

    def lock(self, key: str, until: int) -> bool:
        slot = SlotDriver(self._cluster, key.encode("utf-8", "backslashreplace"))
        return RedisGoLock(slot).lock(key, until)
