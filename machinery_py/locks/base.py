"""Contract of a lock store: each name has one holder at most, until release or expiry."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod

import msgspec

from machinery_py.errors import Unsupported


class LockHolding(msgspec.Struct, frozen=True, kw_only=True):
    """One holding of a name.

    Attributes:
        token: random; who has it may renew and release.
        fence: grows with each acquisition of the name. A resource that remembers the greatest one
            can refuse a holder that was too slow.
        expires_at: when it ends by itself, by the store's clock.
    """

    name: str
    token: str
    fence: int
    expires_at: dt.datetime


GO_TRIES = 4  # of LockWithRetries


class GoLock(ABC):
    """Go Machinery's locks: held until a moment, never released. Any thread may call them.

    Raises (each method): as Lock; ValueError: somebody else's key has this name.
    """

    @abstractmethod
    def lock(self, key: str, until: int) -> bool:
        """Hold the key until then (nanoseconds since 1970; Go's Lock takes one less).

        False: somebody has it.
        """

    def lock_with_retries(self, key: str, until: int) -> bool:
        """Try four times, without a pause, as Go does on Redis."""
        return any(self.lock(key, until) for _ in range(GO_TRIES))


def go_lock_key(program: str, name: str, spec: str) -> str:
    """Return the key under which Go's scheduler locks a tick; `program` is the Go binary's path."""
    path = program.rstrip("/")
    base = path.rpartition("/")[2] if path else "/" if program else "."
    return f"machinery_lock_{base}{name}{spec}"


class Lock(ABC):
    """Store of locks. All methods may be called from any thread.

    Raises (each method):
        BackendUnavailable: the store did not answer in time.
        StoreUnusable: the store cannot be worked with.
    """

    @abstractmethod
    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        """Take the name for `ttl` seconds; None if somebody has it. Does not wait.

        Of many who try at once one succeeds.
        """

    @abstractmethod
    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        """Hold it for `ttl` seconds from now. False: it had expired or was released."""

    @abstractmethod
    def release(self, held: LockHolding) -> bool:
        """Release it. False: it was not ours any more, and nothing was done."""

    def go(self) -> GoLock:
        """Return the locks that Go programs see.

        Raises:
            Unsupported: Go knows none in this store.
        """
        raise Unsupported(
            f"{type(self).__name__}: Go Machinery knows no locks there "
            "(expected a redis:// URL for `lock`)"
        )

    @abstractmethod
    def close(self) -> None:
        """Close connections; what is held stays held. May be called twice."""
