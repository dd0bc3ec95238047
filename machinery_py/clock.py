"""The time, asked in one place, so that tests can say what it is."""

from __future__ import annotations

import datetime as dt
import functools
import time
from collections.abc import Callable
from typing import Protocol

UTC = dt.timezone.utc
# Seconds; nothing waits longer, whatever a message says. Go's clock ends in 2262.
LONGEST = 100 * 365 * 86400.0
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)


def micros(moment: dt.datetime) -> int:
    """A moment as stores keep it: microseconds since 1970, UTC."""
    passed = moment - _EPOCH
    return (passed.days * 86400 + passed.seconds) * 1_000_000 + passed.microseconds


def moment_of(number: int) -> dt.datetime:
    """The moment of that many microseconds."""
    return _EPOCH + dt.timedelta(microseconds=number)


#: Seconds since some moment. They go on while the machine is suspended, where the system has such a
#: clock: with it a lease that a store gave is compared, since the store's clock goes on as well.
boottime: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)


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

    now = staticmethod(functools.partial(dt.datetime.now, UTC))
    monotonic = staticmethod(time.monotonic)


SYSTEM_CLOCK = SystemClock()
