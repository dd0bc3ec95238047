"""Waiting for tasks whose states are in a SQLite file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from machinery_py.backends.polling import PollingListener
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.rows import as_json

READ = 500  # UUIDs in one SELECT
REST = 4.0  # a listener that watches many sleeps this much longer than its last look took

# In: UUIDs (JSON). Out: those that are finished.
_FINISHED = """
SELECT uuid FROM tasks
WHERE uuid IN (SELECT value FROM json_each(?)) AND state IN ('SUCCESS', 'FAILURE')
"""


class SQLiteListener(PollingListener):
    """A notifier, and the tasks that are waited for."""

    def __init__(self, driver: SQLiteDriver) -> None:
        super().__init__(self._ask, at_once=READ)
        self._driver = driver
        self._wakeup = driver.notifier("r")

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._wakeup:
            while True:
                started = time.monotonic()
                if self.look():
                    return
                now = time.monotonic()
                # With thousands of tasks a listener would look for ever while others finish tasks.
                rested = now + REST * (now - started) if len(self._watched) > READ else now
                while True:
                    now = time.monotonic()
                    if now >= deadline or self._wakeup.wait(deadline - now):
                        return
                    if time.monotonic() >= rested:
                        break

    def _ask(self, uuids: Sequence[str]) -> Iterable[str]:
        with self._driver.reading() as connection:
            rows = connection.execute(_FINISHED, (as_json(uuids),)).fetchall()
        return [uuid for (uuid,) in rows]

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self) -> None:
        self._wakeup.close()
