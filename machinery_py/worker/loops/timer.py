"""Timer: functions that a thread calls at their time."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread

logger = get_logger(__name__)

SWEEP = 1000  # entries that are kept before the cancelled ones are removed


@dataclass(slots=True, order=True)
class TimerEntry:
    """A function in a timer.

    Attributes:
        due: by the timer's clock.
        every: seconds between two calls; 0: it is called once.
        called_at: the last call; None before the first.
    """

    due: float
    number: int
    function: Callable[[], object] = field(compare=False)
    every: float = field(compare=False)
    wait: float = field(compare=False)  # from the start of the timer
    is_cancelled: bool = field(compare=False, default=False)
    called_at: float | None = field(compare=False, default=None)

    def cancel(self) -> None:
        """Call it no more. A call that has begun goes on."""
        self.is_cancelled = True
        self.function = lambda: None  # what it held, it held until it was due


class Timer:
    """Timer of one thread, which starts with the first entry and ends with `stop`.

    Earlier ones first, then in the order of their making. A function that takes long delays the
    others, and an exception of one is told to `on_error`; the timer goes on.

    Args:
        clock: seconds that never go back.
        on_error: by default the exception is logged, with its traceback.
    """

    def __init__(
        self,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._on_error = on_error or _log
        self._entries: list[TimerEntry] = []
        self._numbers = itertools.count()
        self._sweep_at = SWEEP
        self._changed = threading.Condition()
        self._loop: LoopThread | None = None  # from `start` to `stop`
        self._has_thread = False

    def after(self, seconds: float, function: Callable[[], object]) -> TimerEntry:
        """Call it once, so many seconds from now; while the timer is stopped: from its start.

        Raises:
            ValueError: the seconds are negative, or no number.
        """
        return self._add(TimerEntry(0.0, 0, function, every=0.0, wait=seconds))

    def every(
        self, seconds: float, function: Callable[[], object], *, first: float | None = None
    ) -> TimerEntry:
        """Call it again and again.

        Calls follow a fixed beat, which does not drift. Those whose time passed while an earlier
        one went on are left out.

        Args:
            first: seconds until the first call; by default as between two.

        Raises:
            ValueError: the seconds are not more than 0, or `first` is negative, or no number.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"every {seconds!r} seconds is not possible (give a number above 0)")
        wait = seconds if first is None else first
        return self._add(TimerEntry(0.0, 0, function, every=seconds, wait=wait))

    def start(self) -> None:
        """Begin. What was entered before counts from now."""
        with self._changed:
            now = self._clock()
            for entry in self._entries:
                entry.due = now + entry.wait
            heapq.heapify(self._entries)
            loop = LoopThread(self._name, lambda: self._work(loop), wake=self._wake)
            self._loop, self._has_thread = loop, False
            if self._entries:
                self._start_thread()

    def stop(self) -> None:
        """End after the call that goes on, without waiting for it. Entries stay for a `start`."""
        if self._loop is not None:
            self._loop.stop()

    def close(self, timeout: float) -> None:
        """End, and wait for that; a function that goes on for longer is left behind."""
        self.stop()
        if self._loop is not None and not self._loop.join(timeout):
            logger.error("%s: a timed function did not end within %g s", self._name, timeout)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the timer itself: a fault of ours, or of `on_error`."""
        return self._loop.failure if self._loop is not None else None

    def fire(self, is_over: Callable[[], bool] = lambda: False) -> float:
        """Call what is due, until it is over; return the seconds until the next, or infinity."""
        while not is_over():
            with self._changed:
                while self._entries and self._entries[0].is_cancelled:
                    heapq.heappop(self._entries)
                now = self._clock()
                if not self._entries:
                    return math.inf
                entry = self._entries[0]
                if entry.due > now:
                    return entry.due - now
                if entry.every:
                    missed = (now - entry.due) // entry.every
                    entry.due += entry.every * (missed + 1)
                    heapq.heapreplace(self._entries, entry)
                else:
                    heapq.heappop(self._entries)
            entry.called_at = now
            try:
                entry.function()
            except BaseException as error:  # user code may raise SystemExit
                self._on_error(error)
        return 0.0

    def _add(self, entry: TimerEntry) -> TimerEntry:
        if not 0 <= entry.wait < math.inf:
            raise ValueError(f"after {entry.wait!r} seconds is not possible (give 0, or more)")
        with self._changed:
            self._start_thread()  # first: it may fail, and the entry is not to be there then
            entry.number, entry.due = next(self._numbers), self._clock() + entry.wait
            heapq.heappush(self._entries, entry)
            if len(self._entries) >= self._sweep_at:
                self._sweep()
            if self._entries[0] is entry:
                self._changed.notify_all()
        return entry

    def _sweep(self) -> None:
        """Remove cancelled entries: before one that is due in hours a million may have been."""
        self._entries = [one for one in self._entries if not one.is_cancelled]
        heapq.heapify(self._entries)
        self._sweep_at = max(SWEEP, 2 * len(self._entries))

    def _start_thread(self) -> None:
        loop = self._loop
        if loop and not self._has_thread and not loop.is_stopping():
            loop.start()
            self._has_thread = True

    def _work(self, loop: LoopThread) -> None:
        # Its own loop: a function that was left behind may return after the next start.
        while not loop.is_stopping():
            pause = self.fire(loop.is_stopping)
            with self._changed:
                if self._entries and pause > 0:
                    pause = min(pause, self._entries[0].due - self._clock())
                if pause > 0 and not loop.is_stopping():
                    self._changed.wait(min(pause, threading.TIMEOUT_MAX))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _log(error: BaseException) -> None:
    logger.error("a timed function failed", exc_info=error)
