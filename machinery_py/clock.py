"""The time, asked in one place, so that tests can say what it is."""

from __future__ import annotations

import datetime as dt
import functools
import math
import numbers
import time
from collections.abc import Callable
from typing import Protocol

UTC = dt.timezone.utc
# Seconds; nothing waits longer, whatever a message says. Go's clock ends in 2262.
LONGEST = 100 * 365 * 86400.0
ABOVE_ZERO = math.ulp(0.0)  # `least` of `seconds_of` for a length that must not be 0
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_between = dt.datetime.__sub__
#: The last moment that a store may tell; a day before that of datetime, for time zones.
LAST = dt.datetime(9999, 12, 30, tzinfo=UTC)

#: A length of time, as public calls take it: seconds, or a timedelta. Inside it is a float.
Seconds = float | dt.timedelta


def seconds_of(what: str, length: Seconds, *, least: float = 0.0, most: float = math.inf) -> float:
    """Return a length in seconds.

    Args:
        what: the parameter, for the error.

    Raises:
        TypeError: it is neither a number nor a timedelta; True and "5" are not.
        ValueError: it is NaN, or not in these bounds.
    """
    number = length.total_seconds() if isinstance(length, dt.timedelta) else length
    if not isinstance(number, (float, numbers.Real)) or isinstance(number, bool):
        raise TypeError(f"{what}: found {length!r} (expected seconds as a number, or a timedelta)")
    if not least <= number <= most:
        raise ValueError(
            f"{what}: found {length!r} (expected seconds or a timedelta{_bounds(least, most)})"
        )
    try:
        return float(number)
    except OverflowError:  # an int that no float can be
        return math.inf if number > 0 else -math.inf


def timeout_of(timeout: Seconds | None) -> float | None:
    """Return the seconds that a call waits. A negative timeout is over, as 0 is; None: no end.

    Raises:
        TypeError, ValueError: as `seconds_of`.
    """
    if timeout is None:
        return None
    return max(0.0, seconds_of("timeout", timeout, least=-math.inf))


def _bounds(least: float, most: float) -> str:
    text = ", more than 0" if least == ABOVE_ZERO else ""
    if ABOVE_ZERO != least > -math.inf:
        text = f", {least:g} or more"
    return text + (f", at most {most:,.12g} s" if most < math.inf else "")


def micros(moment: dt.datetime) -> int:
    """A moment as stores keep it: microseconds since 1970, UTC."""
    # Subclasses, as that of pendulum, subtract to something else.
    return _between(moment, _EPOCH) // _MICROSECOND


def moment_of(number: int) -> dt.datetime:
    """The moment of that many microseconds.

    Another program may have written any number: beyond the last moment it is the last, at the end
    of 9999, and before the first it is the first, 1970.
    """
    try:
        return _EPOCH + number * _MICROSECOND
    except OverflowError:
        return LAST if number > 0 else _EPOCH


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

    now: staticmethod[[], dt.datetime] = staticmethod(functools.partial(dt.datetime.now, UTC))
    monotonic: staticmethod[[], float] = staticmethod(time.monotonic)


SYSTEM_CLOCK = SystemClock()
