"""Listener of a store that tells nobody when a task has finished: it asks again and again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from machinery_py.backends.base import Listener
from machinery_py.bounds import in_steps
from machinery_py.errors import MachineryError

#: Return those of these tasks that have finished.
Finished = Callable[[Sequence[str]], Iterable[str]]


class PollingListener(Listener):
    """A set of watched tasks, which are looked at ever more rarely while a thread waits.

    Args:
        finished: asks the store; called with at most `at_once` tasks.
        soonest, latest: seconds between two looks; in between, `share` of the time waited so far.
        rest: a pause is at least so many times as long as the look before it.
        notifier: an event that ends a pause when it is set, as `wake` does.
    """

    def __init__(
        self,
        finished: Finished,
        *,
        at_once: int = 1000,
        soonest: float = 0.005,
        latest: float = 0.5,
        share: float = 0.1,
        rest: float = 0.0,
        notifier: threading.Event | None = None,
    ) -> None:
        self._finished = finished
        self._at_once = at_once
        self._soonest, self._latest, self._share, self._rest = soonest, latest, share, rest
        self._notifier = notifier or threading.Event()
        self._woken = False
        self._lock = threading.Lock()
        self._watched: set[str] = set()
        self._looked = 0  # tasks that were looked at: the next look begins behind them

    def watch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._lock:
            self._watched.difference_update(uuids)

    def look(self, until: float = math.inf) -> bool:
        """Return whether watched tasks have finished; those are not watched any more.

        Args:
            until: by the monotonic clock: then, or after `wake`, the rest is left to the next look.
        """
        with self._lock:
            watched = list(self._watched)
        first = self._looked % len(watched) if watched else 0
        finished: set[str] = set()
        for some in in_steps([*watched[first:], *watched[:first]], self._at_once):
            finished.update(self._finished(some))
            self._looked += len(some)
            if self._woken or time.monotonic() >= until:
                break
        with self._lock:
            self._watched.difference_update(finished)
        return bool(finished)

    def wait(self, timeout: float) -> None:
        began = time.monotonic()
        while not self._woken:
            started = time.monotonic()
            try:
                if self.look(began + timeout):
                    break
            except MachineryError:
                pass  # the waiter reads the states itself, and is told then
            now = time.monotonic()
            left = began + timeout - now
            if left <= 0:
                break
            pause = max(self._soonest, min(self._latest, (now - began) * self._share))
            self._notifier.wait(min(left, max(pause, (now - started) * self._rest)))
            self._notifier.clear()
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        self._notifier.set()

    def close(self) -> None:
        """Let a waiting `wait` return."""
        self.wake()
