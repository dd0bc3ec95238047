"""Waiting for tasks of a MongoDB to finish: a notifier inside this process, and looks that become rarer.

Limits: what another process finishes is noticed at the next look: 5 ms after the begin of the wait, and later at a tenth of
the time that has passed, at most half a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from machinery_py.backends.base import Listener
from machinery_py.connections.mongodb.client import MongoDriver, Store
from machinery_py.errors import MachineryError
from machinery_py.tasks.states import State

READ = 1000  # UUIDs in one look
SOONEST, LATEST = 0.005, 0.5  # seconds between two looks

_FINISHED = [State.SUCCESS.value, State.FAILURE.value]


class MongoListener(Listener):
    """The tasks that are waited for."""

    def __init__(self, driver: MongoDriver) -> None:
        self._driver = driver
        self._notifier = driver.notifier("results")
        self._lock = threading.Lock()
        self._watched: set[str] = set()
        self._woken = False

    def watch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.difference_update(uuids)

    def wait(self, timeout: float) -> None:
        began = time.monotonic()
        while not self._woken:
            if self._look():
                break
            now = time.monotonic()
            left = began + timeout - now
            if left <= 0:
                break
            self._notifier.wait(min(left, max(SOONEST, min(LATEST, (now - began) / 10))))
        self._woken = False

    def _look(self) -> bool:
        """Whether watched tasks have finished; those are not watched any more."""
        with self._lock:
            watched = list(self._watched)
        finished: set[str] = set()

        def look(store: Store) -> None:
            for start in range(0, len(watched), READ):
                query = {"_id": {"$in": watched[start : start + READ]}, "state": {"$in": _FINISHED}}
                finished.update(one["_id"] for one in store.tasks.find(query, {"_id": 1}))

        try:
            if watched:
                self._driver.run(look, doing="looking for results")
        except MachineryError:
            return True  # the waiter's own look says what is wrong
        with self._lock:
            self._watched.difference_update(finished)
        return bool(finished)

    def wake(self) -> None:
        self._woken = True
        self._notifier.notify()

    def close(self) -> None:
        self._watched.clear()
