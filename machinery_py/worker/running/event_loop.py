"""The event loop of a worker: a thread that runs coroutine tasks, and coroutine handlers."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from machinery_py.errors import MachineryError
from machinery_py.texts import get_logger

if TYPE_CHECKING:
    import asyncio

logger = get_logger(__name__)

END_TIMEOUT = 2.0  # seconds for what is left on the loop to end

T = TypeVar("T")


class EventLoopThread:
    """An event loop in a thread of its own, which starts at the first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; started if it does not run yet."""
        if self._loop is not None:
            return self._loop
        import asyncio  # loaded for coroutines only

        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(loop,), name=f"{self._name}-loop", daemon=True
                )
                self._thread.start()
                self._loop = loop
            return self._loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop, and wait for what it returns or raises. Not for the loop's thread.

        Raises:
            MachineryError: the loop is closed.
        """
        import asyncio

        with self._lock:
            if self._closed:
                coroutine.close()
                raise MachineryError(
                    f"the event loop of {self._name} has ended; not run: {coroutine}"
                )
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result()

    def close(self) -> None:
        """Cancel what runs on the loop, and end its thread. May be called twice."""
        with self._lock:  # what came before is on the loop, and is cancelled
            self._closed = True
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=END_TIMEOUT)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until it is closed, then cancel what is left."""
        import asyncio

        try:
            while True:  # once at least: something may have come just before its end
                try:
                    loop.run_forever()
                except BaseException:  # SystemExit of what a task left running; others need it
                    logger.exception(
                        "something that a task started has left the event loop; it goes on"
                    )
                if self._closed:
                    break
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=END_TIMEOUT))
            loop.close()
