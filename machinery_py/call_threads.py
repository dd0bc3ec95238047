"""Threads of ours in which coroutines make calls that block.

asyncio's default executor is user code's: `asyncio.to_thread` may fill it for as long as it likes.
A call that takes something (a lock, a slot) gives it back itself when its coroutine has ended
meanwhile: the coroutine may be cancelled again while it cleans up, or its loop may be closed.
"""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections.abc import Callable

# Not later: once the interpreter ends it cannot be loaded, and clients of stores need it.
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from machinery_py.texts import get_logger

logger = get_logger(__name__)

THREADS = 64  # at most, of each kind of call; they are started as they are needed

R = TypeVar("R")


class CallThreads:
    """A pool of threads. May be used from any thread; made anew in a forked child."""

    def __init__(self, name: str, size: int = THREADS) -> None:
        self._name = name
        self._size = size
        self.forget()
        _pools.add(self)

    def forget(self) -> None:
        """Begin anew, in a child: it has none of the threads."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def _open(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._size, thread_name_prefix=self._name)
            return self._pool

    def submit(self, call: Callable[[], R]) -> Future[R]:
        """Make the call in a thread, with the caller's context variables."""
        context = contextvars.copy_context()
        try:
            return (self._pool or self._open()).submit(context.run, call)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
        # The interpreter is ending, in `atexit`: nothing else runs, so the caller can make it.
        made: Future[R] = Future()
        try:
            made.set_result(context.run(call))
        except BaseException as error:
            made.set_exception(error)
        return made


_pools: weakref.WeakSet[CallThreads] = weakref.WeakSet()
CALLS = CallThreads("machinery-calls")


async def in_thread(call: Callable[[], R], *, goes_on: bool = False) -> R:
    """Await the call.

    Args:
        goes_on: it is made even if the coroutine is cancelled before a thread has begun with it.
    """
    import asyncio  # loaded by now: we are in a coroutine

    waiting = asyncio.wrap_future(CALLS.submit(call))
    return await (asyncio.shield(waiting) if goes_on else waiting)


async def taking(call: Callable[[], R], give_back: Callable[[R], object]) -> R:
    """Await a call that takes something, and return what it took.

    A coroutine that is cancelled waits until that is given back; cancelled once more it ends at
    once, and the thread gives it back.

    Args:
        give_back: called in a thread with what was taken, if the coroutine does not get it.
    """
    import asyncio  # loaded by now: we are in a coroutine

    attempt = CALLS.submit(call)
    waiting = asyncio.wrap_future(attempt)
    try:
        return await asyncio.shield(waiting)
    except (asyncio.CancelledError, GeneratorExit) as error:
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # not logged
        over: Future[None] = Future()
        attempt.add_done_callback(lambda _: CALLS.submit(lambda: _undo(attempt, give_back, over)))
        if isinstance(error, asyncio.CancelledError):
            await asyncio.shield(asyncio.wrap_future(over))
        raise


def _undo(attempt: Future[R], give_back: Callable[[R], object], over: Future[None]) -> None:
    try:
        if attempt.exception() is None:
            give_back(attempt.result())
    except Exception:  # nobody waits for it any more
        logger.exception("what a cancelled call has taken could not be given back")
    finally:
        over.set_result(None)


def _after_fork() -> None:
    for pool in list(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
