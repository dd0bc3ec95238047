"""Lamport's logical clock: an order of events that no wall clock has to agree with.

    an event here     forward()        +1
    a send            forward()        +1, and the value travels with what is sent
    a receive         adjust(value)    max(own, received) + 1

If an event can have caused another, its clock is smaller. The converse does not hold: of two events
that know nothing of each other, either may have the smaller clock. `Event.stamp` orders all.
"""

from __future__ import annotations

from machinery_py.connections.forks import ForkLock

MOST = 2**53 - 1  # every reader of JSON has integers up to this
# What is received beyond is nobody's clock (µs since 1970: the year 2112): it must not end at MOST.
MOST_RECEIVED = 2**52


class LamportClock:
    """The logical clock of one application. Any thread may use it. It stands still at MOST."""

    def __init__(self, value: int = 0) -> None:
        if not 0 <= value <= MOST:
            raise ValueError(f"LamportClock: found {value!r} (expected 0 to {MOST})")
        self._value = value
        self._lock = ForkLock(reentrant=True)

    @property
    def value(self) -> int:
        return self._value

    def __str__(self) -> str:
        return str(self._value)

    def __repr__(self) -> str:
        return f"LamportClock({self._value})"

    def forward(self) -> int:
        """Count one event, and return its clock."""
        with self._lock:
            self._value = min(self._value + 1, MOST)
            return self._value

    def adjust(self, other: int) -> int:
        """Count the receipt of something with this clock, and return the clock of the receipt.

        Args:
            other: 0 if it came without one; so counts what cannot be a clock.
        """
        with self._lock:
            received = other if 0 <= other <= MOST_RECEIVED else 0
            self._value = min(max(self._value, received) + 1, MOST)
            return self._value
