"""Maintenance: one thread that beats, tends the store, settles groups that a crash left behind, and
cancels or gives back what this worker holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from machinery_py.app import Application
from machinery_py.errors import MachineryError
from machinery_py.revocation import revoked_among
from machinery_py.stores.base import Session
from machinery_py.texts import get_logger
from machinery_py.worker.lease import WorkerLease
from machinery_py.worker.loops.chords import settle_ready_groups
from machinery_py.worker.loops.go_groups import GoGroupPoller
from machinery_py.worker.loops.receiver import Receiver
from machinery_py.worker.loops.settler import Settler
from machinery_py.worker.loops.timer import Timer
from machinery_py.worker.running.executors import Executors
from machinery_py.worker.running.runner import Run

logger = get_logger(__name__)

STALE = 1.0  # seconds a claimed task may wait for a slot before other workers may have it
LONGEST_SLEEP = 0.5  # seconds; bounds how late a running task is asked to stop
SHORTEST_SLEEP = 0.02  # seconds between two looks, or two calls of `tend`
AFTER_FAILURE = 1.0  # seconds to the next try when the store could not be tended
GROUPS_EVERY = 5.0  # seconds between two searches for groups that nobody settled


class Maintenance:
    """Regular work of one worker, in a thread of its own.

    Attributes:
        beat_every: seconds.
    """

    def __init__(
        self,
        app: Application,
        session: Session,
        receiver: Receiver,
        executors: Executors,
        settler: Settler,
        groups: GoGroupPoller,
        *,
        lease: WorkerLease,
        name: str,
        on_beat: Callable[[], None],
    ) -> None:
        self._app = app
        self._session = session
        self._receiver = receiver
        self._executors = executors
        self._settler = settler
        self._groups = groups
        self._lease = lease
        lease.on_lost = self._lost
        self._on_beat = on_beat
        self.beat_every: float = app.config.lease / 4
        self.timer: Final = Timer(f"{name}-maintenance", on_error=_told)
        self.timer.every(self.beat_every, self._beat, first=0.0)
        self.timer.after(0.0, self._tend)
        self.timer.every(GROUPS_EVERY, self._adopt_groups)
        self.timer.after(0.0, self._look)

    def _beat(self) -> None:
        try:
            self._lease.beat()
        finally:
            self._on_beat()  # alive, whatever the store says

    def _lost(self) -> None:
        logger.warning(
            "this worker has lost its lease (it gave no sign of life for that long: was it "
            "stopped?): what it ran belongs to others now"
        )
        self._receiver.hand_back()  # its new owner runs it
        for run in self._executors.running():
            self._executors.cancel(run)

    def _tend(self) -> None:
        pause = AFTER_FAILURE
        try:
            pause = self._app.store.tend()
        finally:
            pause = max(SHORTEST_SLEEP, min(pause, self.beat_every))
            self.timer.after(pause, self._tend)

    def _adopt_groups(self) -> None:
        self._settle_groups()
        self._groups.adopt()

    def _settle_groups(self) -> None:
        with self._groups.settling:
            settle_ready_groups(self._app, self._groups.note)

    def _look(self) -> None:
        try:
            self._look_after()
            if self._groups.due_in() == 0.0 and self._groups.poll():
                self._settle_groups()
        finally:
            pause = min(LONGEST_SLEEP, max(SHORTEST_SLEEP, self._groups.due_in()))
            self.timer.after(pause, self._look)

    def _look_after(self) -> None:
        """Cancel what was lost or revoked while it ran; give back what waits behind long tasks."""
        running = self._executors.running()
        for run in running:
            if run.context is not None and not run.context.cancelled and self._is_lost(run):
                self._executors.cancel(run)
        self._stop_revoked()
        if len(running) >= self._executors.room:
            long_ago = time.perf_counter() - STALE
            if all(0 < run.first.call_started < long_ago for run in running):
                self._receiver.hand_back()

    def _is_lost(self, run: Run) -> bool:
        """Return whether nothing of the run can be settled; of a batch that is each of its calls.

        A call that is lost runs on with the others, and its settlement alone is fenced.
        """
        is_lost = self._session.consumer.is_lost
        return all(is_lost(one.delivery) and not one.acked for one in run.calls)

    def _stop_revoked(self) -> None:
        """Ask revoked tasks that run to stop, and end those that have not begun."""
        held = {
            one.signature.uuid: one
            for one in self._receiver.held()
            if not one.is_over and not one.revoked
        }
        signatures = [one.signature for one in held.values()]
        for uuid, is_over in (revoked_among(self._app, signatures) if held else {}).items():
            if held[uuid].withdraw(is_over=is_over):
                self._settler.put(held[uuid])
        for run in self._executors.running():
            is_asked = run.context is not None and run.context.cancelled
            if not is_asked and all(one.revoked for one in run.calls):
                self._executors.cancel(run)


def _told(error: BaseException) -> None:
    """Log what went wrong; it is done again at its next time."""
    if isinstance(error, MachineryError):
        logger.debug("maintenance could not be done: %s", error)
    else:
        logger.error("maintenance failed", exc_info=error)
