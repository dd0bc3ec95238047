"""Locks in Redis.

Keys: connections/redis/keys.py.

In a cluster each name is in a slot of its own.

Limits: a server that loses its last writes (no AOF, a failover) forgets which names are held; a resource sees that
by the fence.
"""

from __future__ import annotations

import datetime as dt
import secrets

import msgspec

from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.cluster import RedisClusterDriver, SlotDriver
from machinery_py.connections.redis.keys import encoded
from machinery_py.connections.redis.scripts import Folder
from machinery_py.connections.redis.slots import quoted
from machinery_py.locks.base import GoLock, Lock, LockHolding

FENCE_LIFE = 86_400_000  # ms beyond the lock; in a cluster a clock that is set back by more gives a smaller fence

_lua = Folder("locks/lua")
ACQUIRE = _lua.script("acquire", "taking a lock")
RENEW = _lua.script("change", "renewing a lock")
RELEASE = _lua.script("change", "releasing a lock")
ACQUIRE_IN_CLUSTER = Folder("locks/lua/cluster").script(
    "acquire", "taking a lock", FENCE_LIFE=FENCE_LIFE
)


class RedisLock(Lock):
    """Keys on the driver's server. The driver belongs to its creator."""

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token = secrets.token_hex(16)
        expires_at = self._driver.clock.now() + dt.timedelta(seconds=ttl)
        fence = self._driver.run(ACQUIRE, name, token, _millis(ttl))
        if fence is None:
            return None
        return LockHolding(name=name, token=token, fence=fence, expires_at=expires_at)

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        return bool(self._driver.run(RENEW, held.name, held.token, _millis(ttl)))

    def release(self, held: LockHolding) -> bool:
        return bool(self._driver.run(RELEASE, held.name, held.token, 0, again=False))

    def go(self) -> RedisGoLock:
        return RedisGoLock(self._driver)

    def close(self) -> None:
        pass  # the driver belongs to its creator


class RedisGoLock(GoLock):
    """The commands that Go sends, by this machine's clock, as Go does.

    Go does X: a key that is to be held until this very moment stays for ever, one until the past is an error. Here the first
    is held for a millisecond, the second not at all.
    """

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver

    def lock(self, key: str, until: int) -> bool:
        now = round(self._driver.clock.now().timestamp() * 1e6) * 1000
        left = until - now
        if left < 0:
            return False
        name, value = encoded(key), b"%d" % (until - 1)
        whole = left and left % 10**9 == 0
        life = (b"EX", b"%d" % (left // 10**9)) if whole else (b"PX", b"%d" % max(1, left // 10**6))
        # After a lost reply the repeat finds the key taken: the tick is then left to its holder, as in Go.
        if self._ask(b"SET", name, value, *life, b"NX") is not None:
            return True
        if not self._is_over(name, self._ask(b"GET", name), now):
            return False
        if not self._is_over(name, self._ask(b"GETSET", name, value), now):
            return False
        if left >= 10**9:
            self._ask(b"EXPIRE", name, b"%d" % (left // 10**9))
        else:
            # Go does X: EXPIRE with 0 seconds, which deletes what it has just taken, and the next one takes it again.
            self._ask(b"PEXPIRE", name, b"%d" % max(1, left // 10**6))
        return True

    def _ask(self, *parts: bytes) -> bytes | None:
        reply: bytes | None = self._driver.ask(*parts, doing="taking Go's lock")
        return reply

    @staticmethod
    def _is_over(name: bytes, held: bytes | None, now: int) -> bool:
        """Whether what is held has ended; 0 and nothing say no, as in Go."""
        if held is None:
            return False
        if not held.isdigit():
            raise ValueError(
                f"lock {name.decode(errors='replace')!r}: found {held[:50]!r} (expected a moment in nanoseconds)"
            )
        return 0 < int(held) < now


class ClusterLock(Lock):
    """Keys in a cluster, which belongs to its creator."""

    def __init__(self, cluster: RedisClusterDriver) -> None:
        self._cluster = cluster

    def _at(self, name: str) -> SlotDriver:
        return SlotDriver(self._cluster, f"mpy:{{{quoted(name)}}}:".encode())

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token = secrets.token_hex(16)
        expires_at = self._cluster.clock.now() + dt.timedelta(seconds=ttl)
        fence = self._at(name).run(
            ACQUIRE_IN_CLUSTER, self._cluster.now(), quoted(name), token, _millis(ttl)
        )
        if fence is None:
            return None
        return LockHolding(name=name, token=token, fence=fence, expires_at=expires_at)

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
        pass  # the cluster belongs to its creator


class ClusterGoLock(GoLock):
    """Go's keys, each in its slot."""

    def __init__(self, cluster: RedisClusterDriver) -> None:
        self._cluster = cluster

    def lock(self, key: str, until: int) -> bool:
        return RedisGoLock(SlotDriver(self._cluster, encoded(key))).lock(key, until)


def _millis(seconds: float) -> int:
    return max(1, int(seconds * 1000))
