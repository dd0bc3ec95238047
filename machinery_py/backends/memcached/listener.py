"""Waiting for tasks in memcached to finish: memcached tells nobody, so a waiter looks again and again.

The first looks come quickly, later ones at most PAUSE apart. Who watches many rests between two looks REST times as long as
the look took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from machinery_py.backends.base import Listener
from machinery_py.errors import MachineryError

FIRST = 0.001  # seconds until the second look
GROWTH = 1.25  # each pause is so much longer than the one before
PAUSE = 0.1  # seconds; the longest, if looks are quick
REST = 4.0

#: Which of these tasks have finished.
Look = Callable[[Sequence[str]], Iterable[str]]


class MemcacheListener(Listener):
    """Looks at what is watched until some of it has finished."""

    def __init__(self, look: Look) -> None:
        self._finished = look
        self._lock = threading.Lock()
        self._watched: set[str] = set()
        self._woken = threading.Event()

    def watch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.difference_update(uuids)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        pause = FIRST
        while not self._woken.is_set():
            started = time.monotonic()
            if self._look():
                return
            now = time.monotonic()
            rest = max(pause, REST * (now - started))
            if (
                self._woken.wait(min(rest, max(0.0, deadline - now)))
                or time.monotonic() >= deadline
            ):
                break
            pause = min(PAUSE, pause * GROWTH)
        self._woken.clear()

    def _look(self) -> bool:
        """Whether watched tasks have finished; those are not watched any more."""
        with self._lock:
            watched = list(self._watched)
        try:
            finished = set(self._finished(watched)) if watched else set[str]()
        except MachineryError:
            return False  # whoever waits reads the states himself, and is told then
        with self._lock:
            self._watched.difference_update(finished)
        return bool(finished)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._woken.set()
