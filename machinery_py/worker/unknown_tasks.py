"""When a worker lets others go first: it put a task back that it does not know, and that comes back now.

A worker that waits at the queue gets what comes first, every time; the worker of another program, which knows the task,
may never be the one. So whoever put it back does not claim for a moment when it is due:

    due - NEAR     claims no more
    due + NEAR     tends the store, which puts all on their queue that is due by now
    … + ASIDE      claims again
"""

from __future__ import annotations

import heapq
import math

NEAR = 0.05  # seconds
ASIDE = 0.25  # seconds
SHARE = 4  # at most one second in so many is left to others, however much comes back
MOST = 1000  # moments that are remembered


class Courtesy:
    """The moments at which to step aside, in seconds of one monotonic clock. Belongs to one thread."""

    def __init__(self) -> None:
        self._due: list[float] = []
        self._earliest = -math.inf

    def promise(self, due: float) -> None:
        """Something that was put back comes back at this moment."""
        if len(self._due) < MOST:
            heapq.heappush(self._due, due)

    def starts_in(self, now: float) -> float:
        """Seconds until it is time to step aside; infinite if nothing is to come back."""
        while self._due and self._due[0] - NEAR < self._earliest:
            heapq.heappop(self._due)  # it comes too soon after the last one
        return max(0.0, self._due[0] - NEAR - now) if self._due else math.inf

    def step(self, now: float) -> float:
        """Step aside, after `starts_in` was 0: the seconds until the store is to be tended. Then it is ASIDE until the end."""
        due = max(now, heapq.heappop(self._due))
        self._earliest = due + NEAR + ASIDE + (SHARE - 1) * (2 * NEAR + ASIDE)
        return due + NEAR - now
