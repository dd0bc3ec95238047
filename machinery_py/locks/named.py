"""`server.lock(name)`: a lock across processes, held while its holder lives and needs it.

A holder has a lease of the lock store, which is renewed (locks/keeper.py). A lease that was not
renewed in time is lost: `lost`, `check()` and the end of the `with` block say so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from machinery_py.async_twins import twin
from machinery_py.call_threads import in_thread, taking
from machinery_py.clock import Seconds, boottime, timeout_of
from machinery_py.errors import LockLost, LockNotAcquired, MachineryError
from machinery_py.locks.base import Lock, LockHolding
from machinery_py.locks.keeper import Lease, LeaseKeeper
from machinery_py.locks.waiting import AWAY, Acquiring
from machinery_py.names import check_lock
from machinery_py.tasks.context import check_time

POLL = 0.05, 0.5  # seconds between two tries, at first and at most

LockLease = Lease[Lock, LockHolding]


class LockKeeper(LeaseKeeper[Lock, LockHolding]):
    """Takes and renews the leases of one Server. May be used from any thread.

    Args:
        open_lock: asked for at each use, since a Server may be given other stores.
        lease: seconds; so long is a name held after the death of its holder.
    """

    def __init__(self, open_lock: Callable[[], Lock], lease: Callable[[], float]) -> None:
        super().__init__("lock", lease)
        self._open_lock = open_lock

    def take(self, name: str, *, on_lost: Callable[[], object] | None = None) -> LockLease | None:
        """Take the name; None if somebody has it.

        Args:
            on_lost: called in the keeper's thread when the lease is lost.
        """
        lock, length, asked_at = self._open_lock(), self._length(), boottime()
        held = lock.acquire(name, ttl=length)
        if held is None:
            return None
        lease = Lease(lock, held, asked_at + length, name=name, on_lost=on_lost)
        self.keep(lease)
        return lease

    def _renew(self, leases: Sequence[LockLease], ttl: float) -> list[bool]:
        return [lease.store.renew(lease.held, ttl=ttl) for lease in leases]

    def _release(self, leases: Sequence[LockLease]) -> bool:
        return all(lease.store.release(lease.held) for lease in leases)


class NamedLock:
    """A lock, made by `server.lock`. Not reentrant; for one thread or coroutine at a time.

    with server.lock("feed-7"):                  waits for the holder before
    with server.lock("feed-7", timeout=5):       LockNotAcquired after 5 s
    async with server.lock("feed-7"):            the same in a coroutine
    """

    def __init__(
        self,
        keeper: LockKeeper,
        name: str,
        *,
        timeout: Seconds | None,
        blocking: bool,
        outage: float,
    ) -> None:
        """See `Acquiring` for `outage`. Raises NameRefused: no lock may be called so."""
        check_lock(name)
        self.name = name
        self._outage = outage
        self._keeper = keeper
        length = timeout_of(timeout)
        self._timeout = length if blocking else 0.0
        self._held: LockLease | None = None

    @property
    def held(self) -> bool:
        """Whether it is held by this object, as far as we know."""
        return self._held is not None and not self.lost

    @property
    def lost(self) -> bool:
        """Whether the lease ended too early: somebody else may hold the lock now."""
        return self._held is not None and (self._held.lost or boottime() >= self._held.ends)

    @property
    def fence(self) -> int:
        """Number that grows with each holder; a resource can refuse one smaller than it has seen.

        Raises:
            LockLost: it is not held.
        """
        if self._held is None:
            raise LockLost(self.name)
        return self._held.held.fence

    def check(self) -> None:
        """
        Raises:
            LockLost: it is not held (any more).
        """
        if not self.held:
            raise LockLost(self.name)

    def acquire(self, *, blocking: bool = True, timeout: Seconds | None = None) -> bool:
        """Take the lock. False: it was not free in time.

        Args:
            blocking: False: do not wait.
            timeout: seconds to wait, or a timedelta, also for a store that is away; by default that
                of the lock. Without any, a store may be away for `publish_timeout`.

        Raises:
            BackendUnavailable: the store was away when the time was up.
        """
        wait, poll = self._acquiring(timeout, blocking=blocking), POLL[0]
        while True:
            try:
                if self._try():
                    return True
            except AWAY as error:
                check_time()
                time.sleep(wait.pause_of_outage(error))
                continue
            wait.answered()
            check_time()
            pause = wait.pause(poll * random.uniform(0.5, 1.0))
            if not pause:
                return False
            time.sleep(pause)
            poll = min(POLL[1], poll * 1.5)

    async def acquire_async(self, *, blocking: bool = True, timeout: Seconds | None = None) -> bool:
        """`acquire` for coroutines."""
        import asyncio  # loaded by now: we are in a coroutine

        wait, poll = self._acquiring(timeout, blocking=blocking), POLL[0]
        while True:
            try:
                lease = await taking(lambda: self._keeper.take(self.name), self._give_back)
            except AWAY as error:
                await asyncio.sleep(wait.pause_of_outage(error))
                continue
            if lease is not None:
                self._held = lease
                return True
            wait.answered()
            pause = wait.pause(poll * random.uniform(0.5, 1.0))
            if not pause:
                return False
            await asyncio.sleep(pause)
            poll = min(POLL[1], poll * 1.5)

    def _acquiring(self, timeout: Seconds | None, *, blocking: bool) -> Acquiring:
        length = self._timeout if timeout is None else timeout_of(timeout)
        if not blocking:
            length = 0.0
        return Acquiring(f"lock {self.name!r}", length, outage=self._outage)

    def _try(self) -> bool:
        lease = self._keeper.take(self.name)
        if lease is None:
            return False
        self._held = lease
        return True

    def _give_back(self, lease: LockLease | None) -> None:
        if lease is not None:
            self._released(lambda: self._keeper.give_back(lease))

    def release(self) -> bool:
        """Release it. False: it was lost, or is not held."""
        held, self._held = self._held, None
        return held is not None and self._keeper.give_back(held)

    release_async: Final = twin(release, goes_on=True)

    def __enter__(self) -> NamedLock:
        """
        Raises:
            LockNotAcquired: it could not be held in time.
        """
        if not self.acquire(timeout=self._timeout):
            raise LockNotAcquired(self.name, self._timeout)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """
        Raises:
            LockLost: it was lost inside the block, which raised nothing itself.
        """
        self._left(self._released(self.release), error)

    async def __aenter__(self) -> NamedLock:
        if not await self.acquire_async(timeout=self._timeout):
            raise LockNotAcquired(self.name, self._timeout)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        released = await in_thread(lambda: self._released(self.release), goes_on=True)
        self._left(released, error)

    def _released(self, release: Callable[[], bool]) -> bool:
        try:
            return release()
        except MachineryError as error:
            # What the block did was done under the lock; others wait for the lease to end.
            self._keeper.log_unreleased(repr(self.name), error)
            return True

    def _left(self, released: bool, error: BaseException | None) -> None:
        if not released and error is None:
            raise LockLost(self.name)
