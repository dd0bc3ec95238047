"""Judgement of holds by their beats, for all stores of rows: which are dead."""

from __future__ import annotations

from collections.abc import Iterable

from machinery_py.clock import Clock

PATIENCE = 0.75  # of a lease; holds that live beat each quarter, and a call may take a half


def is_silent(silence: int, lease: int) -> bool:
    """Return whether a beat of this age (µs) is to be watched for a change.

    One in the future is: the clock was set back behind it, and its age says nothing.
    """
    return not 0 <= silence <= lease


class Suspects:
    """Holds that have missed their beats, and since when this process has seen that.

    After an outage, or a pause of this machine, all holds have missed their beats, and looks may
    follow each other at once. So a hold is dead once it was seen silent for PATIENCE.

    Attributes:
        dead: hold → its last beat, as the last look found them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}  # hold → its last beat, since when
        self.dead: dict[str, int] = {}

    def look(self, silent: Iterable[tuple[str, int, float]]) -> None:
        """Take a look at all holds that are silent; with the lease (seconds)."""
        now = self._clock.monotonic()
        seen: dict[str, tuple[int, float]] = {}
        dead: dict[str, int] = {}
        for hold, beat, lease in silent:
            before = self._seen.get(hold)
            since = before[1] if before is not None and before[0] == beat else now
            seen[hold] = beat, since
            if now - since >= PATIENCE * lease:
                dead[hold] = beat
        self._seen, self.dead = seen, dead
