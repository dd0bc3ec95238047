"""The lease of a worker, as the worker itself sees it: may what it has claimed be begun?

A worker that was stopped (SIGSTOP, a suspended machine) for longer than its lease goes on with what
others have run meanwhile. So a lease that is over by this machine's clock is asked for before the
next task begins: a beat that succeeds renews it, also where the keeper has beaten meanwhile or the
store takes nothing from a process that lives (SQLite). Any other answer, or none: nothing begins.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from machinery_py.clock import boottime
from machinery_py.errors import MachineryError
from machinery_py.stores.base import Session


class WorkerLease:
    """Beats of one session, and until when the last one surely holds. Any thread may call it.

    Attributes:
        on_lost: called when the session was given up; all that it had claimed is lost then.

    Args:
        length: seconds.
        clock: seconds that go on while this process, or the machine, stands still.
    """

    def __init__(
        self, session: Session, length: float, clock: Callable[[], float] = boottime
    ) -> None:
        self._session = session
        self._length = length
        self._asking = threading.RLock()
        self.on_lost: Callable[[], object] = lambda: None
        self.now = clock
        self._ends = clock() + length
        self._lost_at = -math.inf

    def beat(self) -> bool:
        """Beat, as Session.beat."""
        with self._asking:
            asked_at = self.now()
            is_ours = self._session.beat()
            if not is_ours:
                # First: what was claimed for the old session must not look held by the new one.
                self._lost_at = self.now()
                self.on_lost()
            self._ends = asked_at + self._length
            return is_ours

    def holds(self, claimed_at: float) -> bool:
        """Return whether what was claimed may be begun.

        A round trip, if the lease is over by the clock.

        Args:
            claimed_at: when the claim was asked for, by `now`.
        """
        if self.now() < self._ends:
            return claimed_at > self._lost_at
        with self._asking:
            if self.now() >= self._ends:
                try:
                    self.beat()
                except MachineryError:
                    return False
            return claimed_at > self._lost_at
