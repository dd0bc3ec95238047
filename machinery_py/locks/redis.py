"""Locks in Redis.

    mpy:lock:{<name>}    "<token> <fence>" while a name is held; expires with it
    mpy:fence            the last fence
    machinery_lock_…     Go's, on request: nanoseconds of the moment until which it is held

Limits: a server that loses its last writes (no AOF, a failover) forgets who holds what; the fence tells a resource.
"""

from __future__ import annotations

import datetime as dt
import secrets

from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.scripts import Folder, pack
from machinery_py.locks.base import GoLock, Lock, LockHolding

_lua = Folder("locks/lua")
_ACQUIRE = _lua.script("acquire")
_CHANGE = _lua.script("change")


class RedisLock(Lock):
    """Keys on the driver's server. The driver belongs to whoever made it."""

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token = secrets.token_hex(16)
        expires_at = self._driver.clock.now() + dt.timedelta(seconds=ttl)
        fence = self._driver.run(_ACQUIRE, pack((name, token, _millis(ttl))), doing="taking a lock")
        if fence is None:
            return None
        return LockHolding(name=name, token=token, fence=fence, expires_at=expires_at)

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        return self._change(held, _millis(ttl), "renewing a lock")

    def release(self, held: LockHolding) -> bool:
        return self._change(held, 0, "releasing a lock")

    def _change(self, held: LockHolding, ms: int, doing: str) -> bool:
        return bool(
            self._driver.run(_CHANGE, pack((held.name, held.token, ms)), doing=doing, again=ms > 0)
        )

    def go(self) -> RedisGoLock:
        return RedisGoLock(self._driver)

    def close(self) -> None:
        pass  # the driver belongs to whoever made it


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
        name, value = key.encode("utf-8", "backslashreplace"), b"%d" % (until - 1)
        whole = left and left % 10**9 == 0
        life = (b"EX", b"%d" % (left // 10**9)) if whole else (b"PX", b"%d" % max(1, left // 10**6))
        # After a lost reply the repeat finds the key taken: the tick is then left to whoever has it, as in Go.
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


def _millis(seconds: float) -> int:
    return max(1, int(seconds * 1000))
