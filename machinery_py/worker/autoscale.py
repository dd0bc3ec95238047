"""How many tasks a worker runs at a time, between a least and a most number.

It grows when for GROW_AFTER all slots were busy and more tasks waited: here, or as far as the last
claim tells, which got as many as it asked for. So it costs no round trip. It shrinks to the most
that ran at a time within SHRINK_AFTER.
"""

from __future__ import annotations

GROW_AFTER = 0.5  # seconds
SHRINK_AFTER = 30.0  # seconds


class Autoscaler:
    """Rule of one worker. Pure: the times are its arguments, monotonic seconds.

    Attributes:
        least, most: tasks at a time.
        last_claim_was_full: set by its owner, with each claim.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self.last_claim_was_full = False
        self._short_since: float | None = None
        self._peak = 0  # most that ran at a time since `_peak_since`
        self._peak_since: float | None = None

    def wanted(self, now: float, *, current: int, running: int, waiting: int) -> int:
        """Return how many tasks are to run at a time from now on.

        Args:
            current: how many may now.
            running: how many do; never more than what is returned.
            waiting: how many are held and wait for a slot.
        """
        if running < current or not (waiting or self.last_claim_was_full):
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= GROW_AFTER and current < self.most:
            self._short_since = self._peak_since = None
            return min(self.most, 2 * current)
        if self._peak_since is None:
            self._peak, self._peak_since = running, now
        self._peak = max(self._peak, running)
        if now - self._peak_since < SHRINK_AFTER:
            return current
        fewer = max(self.least, self._peak)
        self._peak_since = None
        return min(current, fewer)
