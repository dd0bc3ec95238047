"""Fences: numbers that only grow, by which a system can refuse a writer that comes too late.

Whoever hands out a delivery or a lock gives its fence: the later of two has the greater one,
whatever became of their task in between. Each store has one sequence, which never begins anew: a
number is the moment in microseconds, or follows the last one if that is not less. So a clock that
is set back changes nothing, and a store that was emptied goes on above what it gave before.

Where results are in MongoDB, memcached, RabbitMQ or a Redis Cluster, and messages elsewhere, the
last number is kept with each task and by each process: a task whose state is forgotten while the
clock is set back may get a smaller one in another process.

Limits: 2^53, so that Lua and JSON keep them; no store gives a million in a second for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NewType

Fence = NewType("Fence", int)
NO_FENCE = Fence(0)

# µs since 1970: in the year 2112. A clock beyond it is wrong, and fences do not follow it.
LATEST = 2**52


def fence_after(last: int, now: int) -> Fence:
    """Return the next fence; `now`: microseconds by the clock of the store."""
    return Fence(max(last + 1, now if now < LATEST else 0))


class FenceSequence:
    """The fences that one process gives. May be used from any thread.

    Args:
        now: microseconds by the clock of the store.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._last = 0
        self._lock = threading.Lock()

    def next(self) -> Fence:
        with self._lock:
            self._last = fence = fence_after(self._last, self._now())
            return fence


#: The next fence by the clock of this machine, where no store gives one: of a task that is called
#: without a delivery, and of a broker that counts nothing.
local_fence: Final = FenceSequence(lambda: time.time_ns() // 1000).next
