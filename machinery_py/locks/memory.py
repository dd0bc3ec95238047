"""Locks in this process: for tests, and the reference that the others are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import datetime as dt
import heapq
import secrets

from machinery_py.connections.memory import MemoryHub
from machinery_py.locks.base import GoLock, Lock, LockHolding


class MemoryLock(Lock):
    """A dict under the hub's lock."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        # Name → token, and the monotonic second at which it ends.
        self._held: dict[str, tuple[str, float]] = {}
        self._ends: list[tuple[float, str]] = []
        self._go = MemoryGoLock(hub)

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        with self._hub.lock:
            self._forget()
            if name in self._held:
                return None
            token = secrets.token_hex(16)
            self._hold(name, token, ttl)
            expires_at = self._hub.clock.now() + dt.timedelta(seconds=ttl)
            return LockHolding(
                name=name, token=token, fence=self._hub.fences.next(), expires_at=expires_at
            )

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        with self._hub.lock:
            if not self._is_ours(held):
                return False
            self._hold(held.name, held.token, ttl)
            return True

    def release(self, held: LockHolding) -> bool:
        with self._hub.lock:
            if not self._is_ours(held):
                return False
            del self._held[held.name]
            return True

    def _hold(self, name: str, token: str, ttl: float) -> None:
        end = self._hub.clock.monotonic() + ttl
        self._held[name] = token, end
        heapq.heappush(self._ends, (end, name))

    def _is_ours(self, held: LockHolding) -> bool:
        self._forget()
        return self._held.get(held.name, ("", 0.0))[0] == held.token

    def _forget(self) -> None:
        """Drop what is over. Called with the lock held."""
        now = self._hub.clock.monotonic()
        while self._ends and self._ends[0][0] <= now:
            _, name = heapq.heappop(self._ends)
            # It may have been renewed, or released and taken again.
            if name in self._held and self._held[name][1] <= now:
                del self._held[name]

    def go(self) -> MemoryGoLock:
        return self._go

    def close(self) -> None:
        pass  # the hub belongs to whoever made it


class MemoryGoLock(GoLock):
    """Go's eager lock."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._until: dict[str, int] = {}

    def lock(self, key: str, until: int) -> bool:
        with self._hub.lock:
            now = round(self._hub.clock.now().timestamp() * 1e6) * 1000
            if self._until.get(key, -1) >= now:
                return False
            self._until = {one: end for one, end in self._until.items() if end >= now}
            self._until[key] = until - 1
            return True
