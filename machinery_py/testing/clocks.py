"""A clock whose time the test sets."""

from __future__ import annotations

import datetime as dt
import math
import threading

from machinery_py.clock import Seconds, seconds_of

START = dt.datetime(2024, 1, 1, 12, 0, 0, tzinfo=dt.timezone.utc)


class ManualClock:
    """Clock that stands still until it is advanced. May be used from any thread."""

    def __init__(self, start: dt.datetime = START) -> None:
        if start.tzinfo is None:
            raise ValueError(f"start {start!r} is naive (give it a time zone)")
        self._start = start.astimezone(dt.timezone.utc)
        self._passed = dt.timedelta()
        self._lock = threading.Lock()

    def now(self) -> dt.datetime:
        with self._lock:
            return self._start + self._passed

    def monotonic(self) -> float:
        with self._lock:
            return self._passed.total_seconds()

    def advance(self, seconds: Seconds = 0.0, **more: float) -> None:
        """Let time pass: `advance(90)`, `advance(timedelta(hours=1))`, `advance(hours=1)`.

        Raises:
            ValueError: the length is negative; a clock never goes back.
        """
        length = dt.timedelta(seconds=seconds_of("seconds", seconds, least=-math.inf), **more)
        if length < dt.timedelta():
            raise ValueError(
                f"clock advanced by {length.total_seconds():g} s (a clock never goes back)"
            )
        with self._lock:
            self._passed += length

    def set_back(self, seconds: Seconds) -> None:
        """Set the time on the wall back (negative: ahead); `monotonic` goes on."""
        length = dt.timedelta(seconds=seconds_of("seconds", seconds, least=-math.inf))
        with self._lock:
            self._start -= length
