"""Publisher confirms: the server confirms messages by the number that each has on its channel.

confirmed    a queue has it, on disk if it is durable
returned     no queue took it; it is nowhere
refused      the server said no (a full queue that rejects); it is nowhere
unknown      the connection ended, or nothing was said in time
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum

from machinery_py.connections.rabbitmq.frames import AddressedMessage


class End(Enum):
    """Result of publishing a message."""

    UNKNOWN = "unknown"
    CONFIRMED = "confirmed"
    RETURNED = "returned"
    REFUSED = "refused"


class Batch:
    """Parcels on their way. `ends` has one entry for each."""

    def __init__(self, parcels: Sequence[AddressedMessage]) -> None:
        self.parcels = parcels
        self.ends = [End.UNKNOWN] * len(parcels)
        self.failure: Exception | None = None  # why what is unknown is so
        self._left = len(parcels)
        self._heard = time.monotonic()
        self._over = threading.Condition()

    def note(self, first: int, last: int, end: End) -> None:
        """The parcels from `first` to `last` ended so, those that had not ended before."""
        ends = self.ends
        with self._over:
            for index in range(first, last + 1):
                if ends[index] is End.UNKNOWN:
                    ends[index] = end
                    self._left -= 1
            self._heard = time.monotonic()
            if not self._left:
                self._over.notify_all()

    def fail(self, error: Exception) -> None:
        with self._over:
            self.failure = error
            self._over.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether it is known of each what became of it. Gives up when nothing was said for `timeout` seconds."""
        with self._over:
            self._heard = time.monotonic()
            # Nobody wakes us for a part: what was heard is looked at when the time is over.
            while (
                self._left
                and self.failure is None
                and (left := self._heard + timeout - time.monotonic()) > 0
            ):
                self._over.wait(left)
            return not self._left


class _Run:
    """Parcels that were written together, and so have numbers that follow each other."""

    __slots__ = ("ahead", "batch", "first", "index", "last", "low")

    def __init__(self, batch: Batch, index: int, first: int, last: int) -> None:
        self.batch = batch
        self.index = index  # of the parcel whose number is `first`
        self.first = self.low = first
        self.last = last
        self.ahead: set[int] = set()  # confirmed, though `low` is not

    def note(self, first: int, last: int, end: End) -> None:
        self.batch.note(self.index + first - self.first, self.index + last - self.first, end)

    def advance(self) -> None:
        while self.low in self.ahead:
            self.ahead.discard(self.low)
            self.low += 1


class Confirms:
    """The parcels on one channel that are not confirmed. Belongs to one thread."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque()
        self._next = 1

    def wrote(self, batch: Batch, index: int, count: int) -> None:
        """So many parcels of the batch were written, from that index on."""
        self._runs.append(_Run(batch, index, self._next, self._next + count - 1))
        self._next += count

    def hear(self, number: int, end: End, *, multiple: bool) -> None:
        """The server said what became of a parcel, or with `multiple` of all up to it that it has said nothing of."""
        runs = self._runs
        if multiple:
            while runs and runs[0].low <= number:
                run = runs[0]
                last = min(number, run.last)
                self._hear_all(run, last, end)
                if run.low <= run.last:
                    break
                runs.popleft()
            return
        for place, run in enumerate(runs):
            if run.first <= number <= run.last:
                run.note(number, number, end)
                run.ahead.add(number)
                run.advance()
                if run.low > run.last:
                    del runs[place]
                return

    def _hear_all(self, run: _Run, last: int, end: End) -> None:
        run.note(run.low, last, end)
        run.ahead = {number for number in run.ahead if number > last}
        run.low = last + 1
        run.advance()

    def clear(self) -> None:
        self._runs.clear()
