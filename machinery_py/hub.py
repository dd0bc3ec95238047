"""Waking coroutines when tasks finish. Only those who wait in coroutines load asyncio."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from machinery_py.backends.base import Listener

if TYPE_CHECKING:
    import asyncio

LOOK_AGAIN = 1.0  # seconds; the longest a waiter relies on being woken


class Hub:
    """Wakes coroutines when tasks finish: one thread and one listener for all that wait in this process."""

    def __init__(self, open_listener: Callable[[], Listener]) -> None:
        self._open = open_listener
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._watched: collections.Counter[str] = collections.Counter()
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def waiter(self) -> HubWaiter:
        """For one coroutine: `with` it, watch, look, wait."""
        return HubWaiter(self)

    def join(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Set this event at every wake-up."""
        with self._lock:
            self._waiting[id(event)] = (loop, event)
            if self._listener is None:
                self._listener = self._open()
                self._thread = threading.Thread(target=self._run, name="machinery-results", daemon=True)
                self._thread.start()

    def leave(self, event: asyncio.Event, uuids: Iterable[str]) -> None:
        with self._lock:
            self._waiting.pop(id(event), None)
            self._watched.subtract(uuids)
            over = [uuid for uuid in uuids if self._watched[uuid] <= 0]
            for uuid in over:
                del self._watched[uuid]
            if self._listener is not None:
                self._listener.unwatch(over)

    def watch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.update(uuids)
            if self._listener is not None:
                self._listener.watch(uuids)

    def _run(self) -> None:
        listener = cast(Listener, self._listener)
        while not self._closed:
            listener.wait(LOOK_AGAIN)
            with self._lock:
                waiting = list(self._waiting.values())
            for loop, event in waiting:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._closed = True
        with self._lock:
            listener, thread, self._listener, self._thread = self._listener, self._thread, None, None
        if listener is not None and thread is not None:
            listener.wake()
            thread.join(timeout=5.0)
            listener.close()


class HubWaiter:
    """One coroutine's share of the hub."""

    def __init__(self, hub: Hub) -> None:
        import asyncio  # loaded by now: we are in a coroutine

        self._hub = hub
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._watched: set[str] = set()

    def __enter__(self) -> HubWaiter:
        self._hub.join(self._loop, self._event)
        return self

    def __exit__(self, *_: object) -> None:
        self._hub.leave(self._event, self._watched)

    def watch(self, uuids: Iterable[str]) -> bool:
        """Be woken for these as well; whether some of them are new: then look once more before you wait."""
        new = set(uuids) - self._watched
        if new:
            self._watched |= new
            self._hub.watch(new)
        return bool(new)

    async def wait(self, timeout: float) -> None:
        """Return when something may have finished, or after `timeout`."""
        import asyncio

        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()
