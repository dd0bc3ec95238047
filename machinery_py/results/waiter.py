"""Waking coroutines when tasks finish. Only programs that wait in coroutines load asyncio."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterable

from machinery_py.backends.base import Listener
from machinery_py.errors import MachineryError
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread

logger = get_logger(__name__)

LOOK_AGAIN = 1.0  # seconds; the longest a waiter relies on being woken


class AsyncWaiters:
    """Coroutines of this process that wait for tasks: one thread and one listener wake all of them.

    Only `watch` and `close` ask the store: all others are called in the loop, which must not block.
    """

    def __init__(self, open_listener: Callable[[], Listener]) -> None:
        self._open = open_listener
        self._lock = threading.Lock()  # held for moments only
        self._asking = threading.Lock()  # held while the listener is changed
        self._waiting: set[AsyncWaiter] = set()
        self._watched: collections.Counter[str] = collections.Counter()
        self._over: list[str] = []  # UUIDs with no waiter left; the thread tells the listener
        self._listener: Listener | None = None
        self._loop = LoopThread("machinery-results", self._run, wake=self._wake, inside=True)
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Return whether this process made it.

        A forked child has no such thread, and must leave the listener alone.
        """
        return self._pid == os.getpid()

    def waiter(self) -> AsyncWaiter:
        """Return a waiter for one coroutine: `with` it, watch, look, wait."""
        return AsyncWaiter(self)

    def join(self, waiter: AsyncWaiter) -> None:
        """Wake the waiter whenever something may have finished."""
        with self._lock:
            self._waiting.add(waiter)

    def leave(self, waiter: AsyncWaiter) -> None:
        with self._lock:
            self._waiting.discard(waiter)
            for uuid in waiter.watched:
                self._watched[uuid] -= 1
                if self._watched[uuid] <= 0:
                    del self._watched[uuid]
                    self._over.append(uuid)

    def watch(self, waiter: AsyncWaiter, uuids: Iterable[str]) -> None:
        """Wake the waiter for these as well; the listener has them when this returns."""
        with self._asking:
            with self._lock:
                if waiter not in self._waiting:
                    return  # cancelled meanwhile
                new = set(uuids) - waiter.watched
                waiter.watched |= new
                self._watched.update(new)
            if self._loop.is_stopping():
                return  # the waiter looks by itself
            if self._listener is None:
                self._listener = self._open()
                self._loop.start()
            self._listener.watch(new)

    def _run(self) -> None:
        listener = self._listener
        if listener is None:
            return  # closed before it began
        while not self._loop.is_stopping():
            try:
                listener.wait(LOOK_AGAIN)
                self._tidy(listener)
            except MachineryError as error:  # the store is away: each waiter looks, and gets it
                logger.debug("nobody is woken now: %s", error)
                self._loop.pause(LOOK_AGAIN)
            except Exception:  # a mistake of the store's: the waiters look by themselves
                logger.exception("coroutines that wait for results are not woken")
                self._loop.pause(LOOK_AGAIN)
            with self._lock:
                waiting = list(self._waiting)
            for waiter in waiting:
                waiter.wake()

    def _tidy(self, listener: Listener) -> None:
        if not self._over:
            return
        with self._asking:
            with self._lock:
                over, self._over = [uuid for uuid in self._over if uuid not in self._watched], []
            listener.unwatch(over)

    def _wake(self) -> None:
        listener = self._listener  # read once: another thread may close, too
        if listener is not None and self.is_ours:
            listener.wake()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._loop.stop()
        if not self.is_ours:
            return
        with self._asking:
            listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.join(5.0)
            listener.close()


class AsyncWaiter:
    """Waiter of one coroutine. `watched` is guarded by the lock of `AsyncWaiters`."""

    def __init__(self, waiters: AsyncWaiters) -> None:
        import asyncio  # loaded by now: we are in a coroutine

        self._waiters = waiters
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.watched: set[str] = set()

    def __enter__(self) -> AsyncWaiter:
        self._waiters.join(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._waiters.leave(self)

    def watch(self, uuids: Iterable[str]) -> bool:
        """Be woken for these as well. True: some are new; look once more before you wait.

        Called in a thread of its own, because it asks the store.
        """
        new = set(uuids) - self.watched
        if new:
            self._waiters.watch(self, new)
        return bool(new)

    def wake(self) -> None:
        """Wake the coroutine, from the thread of `AsyncWaiters`."""
        with contextlib.suppress(RuntimeError):  # its loop has been closed
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float) -> None:
        """Return when something may have finished, or after `timeout`."""
        import asyncio

        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()
