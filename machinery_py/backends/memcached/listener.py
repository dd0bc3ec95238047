"""Waiting for tasks in memcached to finish: memcached tells nobody, so a waiter looks again and again.

The first looks come quickly, later ones at most PAUSE apart. A listener with many tasks rests between two looks REST times
as long as the look took.
"""

from __future__ import annotations

import sys
import threading
import time

from machinery_py.backends.polling import Finished, PollingListener
from machinery_py.errors import MachineryError

FIRST = 0.001  # seconds until the second look
GROWTH = 1.25  # each pause is so much longer than the one before
PAUSE = 0.1  # seconds; the longest, if looks are quick
REST = 4.0


class MemcacheListener(PollingListener):
    """Looks at what is watched until some of it has finished."""

    READ = sys.maxsize  # the client asks in batches of its own

    def __init__(self, finished: Finished) -> None:
        super().__init__(finished)
        self._woken = threading.Event()

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        pause = FIRST
        while not self._woken.is_set():
            started = time.monotonic()
            try:
                if self.look():
                    return
            except MachineryError:
                pass  # the waiter reads the states itself, and is told then
            now = time.monotonic()
            rest = max(pause, REST * (now - started))
            if (
                self._woken.wait(min(rest, max(0.0, deadline - now)))
                or time.monotonic() >= deadline
            ):
                break
            pause = min(PAUSE, pause * GROWTH)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._woken.set()
