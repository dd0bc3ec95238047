"""The listener of a store that tells nobody when a task has finished: it is asked about the tasks that are watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from machinery_py.backends.base import Listener

#: Return those of these tasks that have finished.
Finished = Callable[[Sequence[str]], Iterable[str]]


class PollingListener(Listener):
    """A set of watched tasks. A subclass says in `wait` how often it looks."""

    READ = 1000  # UUIDs in one question

    def __init__(self, finished: Finished) -> None:
        self._finished = finished
        self._lock = threading.Lock()
        self._watched: set[str] = set()

    def watch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.difference_update(uuids)

    def look(self) -> bool:
        """Return whether watched tasks have finished; those are not watched any more."""
        with self._lock:
            watched = list(self._watched)
        finished: set[str] = set()
        for start in range(0, len(watched), self.READ):
            finished.update(self._finished(watched[start : start + self.READ]))
        with self._lock:
            self._watched.difference_update(finished)
        return bool(finished)
