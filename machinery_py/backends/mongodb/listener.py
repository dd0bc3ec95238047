"""Waiting for tasks of a MongoDB to finish: a notifier inside this process, and looks that become rarer.

Limits: what another process finishes is noticed at the next look: 5 ms after the begin of the wait, and later at a tenth of
the time that has passed, at most half a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from machinery_py.backends.polling import PollingListener
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.errors import MachineryError
from machinery_py.tasks.states import State

SOONEST, LATEST = 0.005, 0.5  # seconds between two looks

_FINISHED = [State.SUCCESS.value, State.FAILURE.value]


class MongoListener(PollingListener):
    """The tasks that are waited for."""

    def __init__(self, driver: MongoDriver) -> None:
        super().__init__(self._ask)
        self._driver = driver
        self._notifier = driver.notifier("results")
        self._woken = False

    def wait(self, timeout: float) -> None:
        began = time.monotonic()
        while not self._woken:
            try:
                if self.look():
                    break
            except MachineryError:
                break  # the waiter's own look says what is wrong
            now = time.monotonic()
            left = began + timeout - now
            if left <= 0:
                break
            self._notifier.wait(min(left, max(SOONEST, min(LATEST, (now - began) / 10))))
        self._woken = False

    def _ask(self, uuids: Sequence[str]) -> Iterable[str]:
        query = {"_id": {"$in": uuids}, "state": {"$in": _FINISHED}}
        return self._driver.run(
            lambda store: [one["_id"] for one in store.tasks.find(query, {"_id": 1})],
            doing="looking for results",
        )

    def wake(self) -> None:
        self._woken = True
        self._notifier.notify()

    def close(self) -> None:
        self._watched.clear()
