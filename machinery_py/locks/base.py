"""The contract of a lock: names, each held by one at most, until it is released or its time is over."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod

import msgspec

from machinery_py.errors import Unsupported


class LockHolding(msgspec.Struct, frozen=True, kw_only=True):
    """One holding of a name.

    Attributes:
        token: random; who has it may renew and release.
        fence: grows with each acquisition of the name. A resource that remembers the greatest it has seen can refuse a
            holder that was too slow.
        expires_at: when it ends by itself, by the store's clock.
    """

    name: str
    token: str
    fence: int
    expires_at: dt.datetime


GO_TRIES = 4  # of LockWithRetries


class GoLock(ABC):
    """Go Machinery's locks: a name is held until a moment, nobody lets go of it before. All methods from any thread.

    Raises (each method): as Lock; ValueError: somebody else's key has this name.
    """

    @abstractmethod
    def lock(self, key: str, until: int) -> bool:
        """Hold the key until then; False if somebody has it. `until`: nanoseconds since 1970. (Go's Lock takes one less.)"""

    def lock_with_retries(self, key: str, until: int) -> bool:
        """Try four times, without a pause, as Go does on Redis."""
        return any(self.lock(key, until) for _ in range(GO_TRIES))


def go_lock_key(program: str, name: str, spec: str) -> str:
    """The key under which Go's scheduler locks a tick. `program`: the Go binary, as it was started."""
    path = program.rstrip("/")
    base = path.rpartition("/")[2] if path else "/" if program else "."
    return f"machinery_lock_{base}{name}{spec}"


class Lock(ABC):
    """Gives out names. All methods may be called from any thread.

    Raises (each method):
        BackendUnavailable: the store did not answer in time.
        StoreUnusable: the store cannot be worked with.
    """

    @abstractmethod
    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        """Take the name for `ttl` seconds, or None if somebody has it. Of many who try at once one succeeds.

        Does not wait for the holder.
        """

    @abstractmethod
    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        """Hold it for `ttl` seconds from now. False: its time was over or it was released, and nothing was done."""

    @abstractmethod
    def release(self, held: LockHolding) -> bool:
        """Let others have it. False: it was not ours any more, and nothing was done."""

    def go(self) -> GoLock:
        """Locks that Go programs see.

        Raises:
            Unsupported: Go knows none in this store.
        """
        raise Unsupported(
            f"{type(self).__name__}: Go Machinery knows no locks there (expected a redis:// URL for `lock`)"
        )

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the operating system; what is held stays so. May be called twice."""
