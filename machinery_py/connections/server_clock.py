"""Clock of a server, as this process knows it."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Callable
from contextlib import suppress

from machinery_py.clock import SYSTEM_CLOCK, Clock
from machinery_py.errors import MachineryError

CLOCK_LIFE = 60.0  # seconds until a clock is measured again
ROUGH = dt.timedelta(milliseconds=5)  # a smaller difference is none


class ServerClock:
    """The clock of a server: that of this machine, with the difference as it was last measured.

    All moments that a store keeps, or compares with what it keeps, are its server's. A clock that
    is not the system's, as in tests, is taken for the server's as well.

    Args:
        ask: does anything with the server, which measures the clock.
    """

    def __init__(self, host: Clock, ask: Callable[[], object] | None = None) -> None:
        self.host = host
        self.ahead: dt.timedelta = dt.timedelta()
        self.is_system: bool = host is SYSTEM_CLOCK
        self._ask = ask
        self._measured_at = -math.inf

    def now(self) -> dt.datetime:
        return self.host.now() + self.ahead if self.ahead else self.host.now()

    def monotonic(self) -> float:
        return self.host.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time to measure."""
        return self.is_system and time.monotonic() - self._measured_at >= CLOCK_LIFE

    def measure(self, read: Callable[[], dt.datetime | None]) -> None:
        """Take the difference to the moment that the server tells, to half of the round trip."""
        self._measured_at = time.monotonic()
        before = self.host.now()
        there = read()
        after = self.host.now()
        if there is not None:
            ahead = there - (before + (after - before) / 2)
            self.ahead = ahead if abs(ahead) > ROUGH + (after - before) else dt.timedelta()

    def ask(self) -> None:
        """Have it measured, if it never was; without an answer it stays this machine's."""
        if self._ask is not None and self.is_system and self._measured_at == -math.inf:
            with suppress(MachineryError):
                self._ask()
            self._measured_at = max(self._measured_at, 0.0)
