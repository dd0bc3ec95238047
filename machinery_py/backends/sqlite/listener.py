"""Waiting for tasks of a SQLite file to finish: a wake-up, and a look at the tasks that are watched.

Limits: every commit that finishes tasks wakes all listeners. Who watches more than READ tasks rests
between two looks, four times as long as the look took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from machinery_py.backends.base import Listener
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.rows import as_json

READ = 500  # UUIDs in one SELECT
REST = 4.0  # a listener that watches many sleeps this much longer than its last look took

# In: UUIDs (JSON). Out: those that are finished.
_FINISHED = """
SELECT uuid FROM tasks WHERE uuid IN (SELECT value FROM json_each(?)) AND state IN ('SUCCESS', 'FAILURE')
"""


class SQLiteListener(Listener):
    """A notifier, and the tasks that are waited for."""

    def __init__(self, driver: SQLiteDriver) -> None:
        self._driver = driver
        self._notifier = driver.notifier("r")
        self._lock = threading.Lock()
        self._watched: set[str] = set()

    def watch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.difference_update(uuids)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._notifier:
            while True:
                started = time.monotonic()
                if self._look():
                    return
                now = time.monotonic()
                # Who watches thousands would look without end while others finish tasks.
                rested = now + REST * (now - started) if len(self._watched) > READ else now
                while True:
                    now = time.monotonic()
                    if now >= deadline or self._notifier.wait(deadline - now):
                        return
                    if time.monotonic() >= rested:
                        break

    def _look(self) -> bool:
        """Whether watched tasks have finished; those are not watched any more."""
        with self._lock:
            watched = list(self._watched)
        finished: set[str] = set()
        for start in range(0, len(watched), READ):
            wanted = as_json(watched[start : start + READ])
            with self._driver.reading() as connection:
                finished.update(
                    uuid for (uuid,) in connection.execute(_FINISHED, (wanted,)).fetchall()
                )
        with self._lock:
            self._watched.difference_update(finished)
        return bool(finished)

    def wake(self) -> None:
        self._notifier.wake()

    def close(self) -> None:
        self._notifier.close()
