"""The time, asked in one place, so that tests can say what it is."""

from __future__ import annotations

import datetime as dt
import time
from typing import Protocol

UTC = dt.timezone.utc
_utc = dt.timezone.utc
_now = dt.datetime.now


class Clock(Protocol):
    """Where the library takes the time from. May be called from any thread."""

    def now(self) -> dt.datetime:
        """The moment on the wall, aware, in UTC. It may jump; nothing is measured with it."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back. Lengths are measured with it."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> dt.datetime:
        return _now(_utc)

    def monotonic(self) -> float:
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()
