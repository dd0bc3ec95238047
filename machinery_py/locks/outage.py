"""Waiting for a lock or a limit while its store is away, within the time that the caller gives."""

from __future__ import annotations

import time

from machinery_py.errors import BackendUnavailable, BrokerUnavailable
from machinery_py.texts import get_logger

logger = get_logger(__name__)

AWAY = BackendUnavailable, BrokerUnavailable  # refusals that pass; others stay
FIRST_PAUSE = 0.025  # seconds, doubled with each try
LONGEST_PAUSE = 1.0  # seconds


class Outage:
    """Pauses of one `acquire` between tries that its store has not answered.

    Args:
        what: is waited for, as "lock 'feed'".
        deadline: by `time.monotonic`.
    """

    def __init__(self, what: str, deadline: float) -> None:
        self._what = what
        self._deadline = deadline
        self._pause = FIRST_PAUSE

    def pause(self, error: BackendUnavailable | BrokerUnavailable) -> float:
        """Return the seconds to the next try, more than 0; raises the error when time is up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise error
        if self._pause == FIRST_PAUSE:
            logger.warning("waiting for %s, and for its store: %s", self._what, error)
        self._pause = min(LONGEST_PAUSE, self._pause * 2)
        return min(self._pause, left)
