"""Locks in Redis, and Go's locks.

Limits: a server that loses its last writes (no AOF, a failover) forgets which names are held; a
resource sees that by the fence.
"""

from __future__ import annotations

import datetime as dt
import secrets

from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.keys import encoded
from machinery_py.connections.redis.scripts import Folder
from machinery_py.fences import LATEST
from machinery_py.locks.base import GoLock, Lock, LockHolding

_lua = Folder("locks/lua", {"LATEST": LATEST})
ACQUIRE = _lua.script("acquire", "taking a lock")
RENEW = _lua.script("change", "renewing a lock")
RELEASE = _lua.script("change", "releasing a lock")


class RedisLock(Lock):
    """Keys on the driver's server. The driver belongs to its creator."""

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token, driver = secrets.token_hex(16), self._driver
        expires_at = driver.clock.now() + dt.timedelta(seconds=ttl)
        fence: int | None = driver.run(ACQUIRE, driver.now(), name, token, _millis(ttl))
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

    Go does X: a key that is to be held until this very moment stays for ever, one until the past is
    an error. Here the first is held for a millisecond, the second not at all.
    """

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver

    def lock(self, key: str, until: int) -> bool:
        name, value = encoded(key), b"%d" % (until - 1)
        driver = self._driver
        now = round(driver.clock.now().timestamp() * 1e6) * 1000
        left = until - now
        if left < 0:
            return False

        def ask(*parts: bytes) -> bytes | None:
            reply: bytes | None = driver.ask(*parts, doing="taking Go's lock")
            return reply

        whole = left and left % 10**9 == 0
        life = (b"EX", b"%d" % (left // 10**9)) if whole else (b"PX", b"%d" % max(1, left // 10**6))
        # After a lost reply the repeat finds the key taken: the tick is left to its holder, as in
        # Go.
        if ask(b"SET", name, value, *life, b"NX") is not None:
            return True
        if not self._is_over(name, ask(b"GET", name), now):
            return False
        if not self._is_over(name, ask(b"GETSET", name, value), now):
            return False
        if left >= 10**9:
            ask(b"EXPIRE", name, b"%d" % (left // 10**9))
        else:
            # Go does X: EXPIRE with 0 seconds deletes what it has just taken, and the next one
            # takes it.
            ask(b"PEXPIRE", name, b"%d" % max(1, left // 10**6))
        return True

    @staticmethod
    def _is_over(name: bytes, held: bytes | None, now: int) -> bool:
        """Whether what is held has ended; 0 and nothing say no, as in Go."""
        if held is None:
            return False
        if not held.isdigit():
            raise ValueError(
                f"lock {name.decode(errors='replace')!r}: found {held[:50]!r} "
                "(expected a moment in nanoseconds)"
            )
        return 0 < int(held) < now


def _millis(seconds: float) -> int:
    return max(1, int(seconds * 1000))
