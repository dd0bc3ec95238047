"""How many tasks a worker runs at a time, between a least and a most number.

It grows when all slots are busy and the oldest waiting task has waited for GROW_AFTER, as far as
the worker sees without a round trip: since it was claimed, or since a claim last got less than it
asked for, as the queue was empty then. It is doubled until that is no longer so. It shrinks to the
most that were held at a time within SHRINK_AFTER.
"""

from __future__ import annotations

from collections import deque

from machinery_py.errors import ConfigError

GROW_AFTER = 0.5  # seconds
SHRINK_AFTER = 30.0  # seconds


class Autoscaler:
    """Rule of one worker. Pure: the times are its arguments, monotonic seconds.

    Attributes:
        least, most: tasks at a time.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self._more_since: float | None = None  # the queue has more than was claimed
        # Number that was held and when, of those that nothing as large has followed.
        self._peaks: deque[tuple[float, int]] = deque()

    def claimed(self, now: float, *, is_full: bool) -> None:
        """Note a claim; `is_full`: it got as many as it asked for."""
        if not is_full:
            self._more_since = None
        elif self._more_since is None:
            self._more_since = now

    def wanted(self, now: float, *, current: int, held: int, oldest: float | None) -> int:
        """Return how many tasks are to run at a time from now on.

        Args:
            current: how many may now.
            held: how many are claimed and have not ended.
            oldest: when the oldest that waits for a slot was claimed; None: none waits.
        """
        since = [one for one in (oldest, self._more_since) if one is not None]
        if held >= current and since and now - min(since) >= GROW_AFTER:
            current = max(current, min(self.most, 2 * current))
            self._peaks.clear()
        if not self._peaks:
            self._peaks.append((now, current))
        held = min(held, current)
        while self._peaks and self._peaks[-1][1] <= held:
            self._peaks.pop()
        self._peaks.append((now, held))
        while self._peaks[0][0] <= now - SHRINK_AFTER:
            self._peaks.popleft()
        return max(self.least, min(current, self._peaks[0][1]))


def check_autoscale(numbers: tuple[int, int] | None) -> None:
    """Refuse what are not the least and the most tasks at a time.

    Raises:
        ConfigError: the text says what was found.
    """
    if numbers is not None and not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(
            f"autoscale: found {numbers!r} (expected the least and the most tasks at a time, "
            "as (2, 10))"
        )
