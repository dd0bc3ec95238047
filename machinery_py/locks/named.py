"""`server.lock(name)`: a lock across processes, held while its holder lives and needs it.

A holder has a lease of the lock store. One thread of a Server, the keeper, renews all leases; it
starts with the first lock and ends with the last. A lease that was not renewed in time is lost:
`lost`, `check()` and the end of the `with` block say so.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable

from machinery_py.async_twins import twin
from machinery_py.errors import LockLost, LockNotAcquired, MachineryError
from machinery_py.locks.base import Lock, LockHolding
from machinery_py.names import check_lock
from machinery_py.tasks.context import check_time
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread

logger = get_logger(__name__)

POLL = 0.05, 0.5  # seconds between two tries, at first and at most
RENEWALS = 3  # in one lease


class Lease:
    """A name that is held. `ends`: the monotonic second until which it surely is ours."""

    def __init__(
        self, held: LockHolding, ends: float, on_lost: Callable[[], object] | None = None
    ) -> None:
        self.held = held
        self.on_lost = on_lost
        self.ends = ends
        self.lost = False


class LockKeeper:
    """Takes and renews the leases of one Server. May be used from any thread.

    Args:
        open_lock: asked for at each use, since a Server may be given other stores.
        lease: seconds; so long is a name held after the death of its holder.
    """

    def __init__(self, open_lock: Callable[[], Lock], lease: Callable[[], float]) -> None:
        self._open_lock = open_lock
        self._lease = lease
        self._leases: dict[str, tuple[Lock, Lease]] = {}  # by token
        self._over: list[Lease] = []  # to be given back
        self._changed = threading.Condition()
        self._loop: LoopThread | None = None  # while there are leases
        _keepers.add(self)

    def after_fork(self) -> None:
        """In a forked child: what the parent holds is not ours, and its thread is not here."""
        for _, lease in self._leases.values():
            lease.lost = True
        self._leases, self._over, self._loop = {}, [], None
        self._changed = threading.Condition()

    def take(self, name: str, *, on_lost: Callable[[], object] | None = None) -> Lease | None:
        """Take the name; None if somebody has it.

        Args:
            on_lost: called in the keeper's thread when the lease is lost.
        """
        lock, length, asked_at = self._open_lock(), self._lease(), time.monotonic()
        held = lock.acquire(name, ttl=length)
        if held is None:
            return None
        lease = Lease(held, asked_at + length, on_lost)
        with self._changed:
            self._leases[held.token] = lock, lease
            if self._loop is None:
                self._loop = LoopThread("machinery-lock-keeper", self._work)
                self._loop.start()
            self._changed.notify_all()
        return lease

    def give_back(self, lease: Lease) -> bool:
        """Release it. False: it was lost."""
        with self._changed:
            lock, _ = self._leases.pop(lease.held.token, (None, lease))
            self._changed.notify_all()
        if lock is None or lease.lost:
            return False
        return lock.release(lease.held)

    def give_back_soon(self, lease: Lease) -> None:
        """Release it in the keeper's thread: a store that does not answer blocks nobody else."""
        with self._changed:
            if lease.held.token in self._leases:
                self._over.append(lease)
                self._changed.notify_all()

    def flush(self) -> None:
        """Release now what `give_back_soon` was asked for."""
        with self._changed:
            over, self._over = self._over, []
        for lease in over:
            try:
                self.give_back(lease)
            except Exception as error:  # the thread must live on for the others
                _log_unreleased(lease.held.name, error)

    def close(self) -> None:
        """Stop renewing: leases still held expire. May be called twice; a lock starts it again."""
        self.flush()
        with self._changed:
            for _, lease in self._leases.values():
                lease.lost = True
            self._leases.clear()
            loop = self._loop
            self._changed.notify_all()
        if loop is not None:
            loop.join(10.0)

    def _work(self) -> None:
        due_at = time.monotonic() + self._lease() / RENEWALS
        while True:
            with self._changed:
                if not self._leases:
                    self._loop = None
                    return
                while self._leases and not self._over and (left := due_at - time.monotonic()) > 0:
                    self._changed.wait(left)
                leases = list(self._leases.values()) if time.monotonic() >= due_at else []
            self.flush()
            if leases:
                due_at = time.monotonic() + self._lease() / RENEWALS
            for lock, lease in leases:
                self._renew(lock, lease)

    def _renew(self, lock: Lock, lease: Lease) -> None:
        length, asked_at = self._lease(), time.monotonic()
        ours = None
        try:
            ours = lock.renew(lease.held, ttl=length)
        except Exception as error:  # the thread must live on for the others
            trace = not isinstance(error, MachineryError)
            text = "lock %r could not be renewed: %s"
            logger.warning(text, lease.held.name, error, exc_info=trace)
        if ours:
            lease.ends = asked_at + length
            return
        with self._changed:
            given_back = lease.held.token not in self._leases
            if given_back or (ours is None and time.monotonic() < lease.ends):
                return
            lease.lost = True
            del self._leases[lease.held.token]
        logger.error("lock %r is lost: its lease could not be renewed in time", lease.held.name)
        if lease.on_lost is not None:
            lease.on_lost()


def _log_unreleased(name: str, error: Exception) -> None:
    trace = not isinstance(error, MachineryError)
    text = "lock %r could not be released, and ends by itself: %s"
    logger.warning(text, name, error, exc_info=trace)


class NamedLock:
    """A lock, made by `server.lock`. Not reentrant; for one thread or coroutine at a time.

    with server.lock("feed-7"):                  waits for the holder before
    with server.lock("feed-7", timeout=5):       LockNotAcquired after 5 s
    async with server.lock("feed-7"):            the same in a coroutine
    """

    def __init__(
        self, keeper: LockKeeper, name: str, *, timeout: float | None, blocking: bool
    ) -> None:
        """Raises NameRefused: no lock may be called so."""
        check_lock(name)
        self.name = name
        self._keeper = keeper
        self._timeout = timeout if blocking else 0.0
        self._held: Lease | None = None

    @property
    def held(self) -> bool:
        """Whether it is held by this object, as far as we know."""
        return self._held is not None and not self.lost

    @property
    def lost(self) -> bool:
        """Whether the lease ended too early: somebody else may hold the lock now."""
        return self._held is not None and (self._held.lost or time.monotonic() >= self._held.ends)

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

    def acquire(self, *, blocking: bool = True, timeout: float | None = None) -> bool:
        """Take the lock. False: it was not free in time.

        Args:
            blocking: False: do not wait.
            timeout: seconds to wait; by default those of the lock.
        """
        deadline = self._deadline(timeout, blocking=blocking)
        pause = POLL[0]
        while not self._try():
            check_time()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(POLL[1], pause * 1.5)
        return True

    async def acquire_async(self, *, blocking: bool = True, timeout: float | None = None) -> bool:
        """`acquire` for coroutines."""
        import asyncio  # loaded by now: we are in a coroutine

        deadline = self._deadline(timeout, blocking=blocking)
        pause = POLL[0]
        while True:
            attempt = asyncio.ensure_future(asyncio.to_thread(self._try))
            try:
                taken = await asyncio.shield(attempt)
            except asyncio.CancelledError:
                if await attempt:  # nobody would ever let go of it
                    await asyncio.to_thread(self.release)
                raise
            left = deadline - time.monotonic()
            if taken or left <= 0:
                return taken
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(POLL[1], pause * 1.5)

    def _deadline(self, timeout: float | None, *, blocking: bool) -> float:
        if timeout is None:
            timeout = self._timeout
        if not blocking:
            timeout = 0.0
        return time.monotonic() + (float("inf") if timeout is None else timeout)

    def _try(self) -> bool:
        lease = self._keeper.take(self.name)
        if lease is None:
            return False
        self._held = lease
        return True

    def release(self) -> bool:
        """Release it. False: it was lost, or is not held."""
        held, self._held = self._held, None
        return held is not None and self._keeper.give_back(held)

    release_async = twin(release)

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
        import asyncio

        self._left(await asyncio.shield(asyncio.to_thread(self._released, self.release)), error)

    def _released(self, release: Callable[[], bool]) -> bool:
        try:
            return release()
        except MachineryError as error:
            # What the block did was done under the lock; others wait for the lease to end.
            _log_unreleased(self.name, error)
            return True

    def _left(self, released: bool, error: BaseException | None) -> None:
        if not released and error is None:
            raise LockLost(self.name)


_keepers: weakref.WeakSet[LockKeeper] = weakref.WeakSet()


def _after_fork() -> None:
    for keeper in list(_keepers):
        keeper.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
