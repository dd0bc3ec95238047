"""Waiting for a lock or a limit: how long, also while its store is away."""

from __future__ import annotations

import math
import time

from machinery_py.errors import BackendUnavailable, BrokerUnavailable
from machinery_py.tasks.context import RUNNING
from machinery_py.texts import get_logger

logger = get_logger(__name__)

AWAY = BackendUnavailable, BrokerUnavailable  # refusals that pass; others stay
FIRST_PAUSE = 0.025  # seconds, doubled with each try
LONGEST_PAUSE = 1.0  # seconds
WARN_AFTER = 10.0  # seconds that a task waits in its slot of the worker

_told: set[str] = set()  # names of tasks


class Acquiring:
    """Time of one `acquire`: pauses between its tries, and the end of its patience.

    Args:
        what: is waited for, as "lock 'feed'".
        timeout: seconds; None: as long as it takes, but for at most `outage` while the store is
            away.
    """

    def __init__(self, what: str, timeout: float | None, *, outage: float) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._deadline = self._begin + (math.inf if timeout is None else timeout)
        self._outage = outage if timeout is None else math.inf
        self._away_since: float | None = None
        self._pause = FIRST_PAUSE

    def answered(self) -> None:
        """Note that the store has answered: an outage is over."""
        self._away_since, self._pause = None, FIRST_PAUSE

    def pause(self, wait: float) -> float:
        """Return the seconds to the next try, `wait` at most; 0 when time is up."""
        now = time.monotonic()
        if now - self._begin >= WARN_AFTER and (task := RUNNING.get()) is not None:
            name = task.signature.name
            if name not in _told:
                _told.add(name)
                logger.warning(
                    "task %s has waited %.0f s for %s in its slot of the worker (the options "
                    "`exclusive` and `max_running` of a task wait without a slot)",
                    name,
                    now - self._begin,
                    self._what,
                )
        return max(0.0, min(wait, self._deadline - now))

    def pause_of_outage(self, error: BackendUnavailable | BrokerUnavailable) -> float:
        """Return the seconds to the next try, more than 0; raises the error when time is up."""
        now = time.monotonic()
        since = now if self._away_since is None else self._away_since
        left = min(self._deadline, since + self._outage) - now
        if left <= 0:
            raise error
        if self._away_since is None:
            self._away_since = now
            logger.warning("waiting for %s, and for its store: %s", self._what, error)
        self._pause = min(LONGEST_PAUSE, self._pause * 2)
        return min(self._pause, left)
