"""Maintenance: one thread that beats, tends the store, settles groups that a crash left behind, and
cancels or gives back what this worker holds."""

from __future__ import annotations

import time
from collections.abc import Callable

from machinery_py.app import Application
from machinery_py.errors import MachineryError
from machinery_py.revocation import revoked_among
from machinery_py.stores.base import Session
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread
from machinery_py.worker.chords import settle_ready_groups
from machinery_py.worker.executors import Executors
from machinery_py.worker.go_groups import GoGroupPoller
from machinery_py.worker.receiver import Receiver
from machinery_py.worker.settler import Settler

logger = get_logger(__name__)

STALE = 1.0  # seconds a claimed task may wait for a slot before other workers may have it
LONGEST_SLEEP = 0.5  # seconds; bounds how late a running task is asked to stop
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
        name: str,
        on_beat: Callable[[], None],
    ) -> None:
        self._app = app
        self._session = session
        self._receiver = receiver
        self._executors = executors
        self._settler = settler
        self._groups = groups
        self._on_beat = on_beat
        self.beat_every = app.config.lease / 4
        self.loop = LoopThread(f"{name}-maintenance", self._work)
        self._beat_at = 0.0
        self._tend_at = 0.0
        self._groups_at = time.monotonic() + GROUPS_EVERY

    def _work(self) -> None:
        while not self.loop.is_stopping():
            try:
                self._beat_if_due()
                self._tend_if_due()
                self._look_after()
                if self._groups.due_in() == 0.0 and self._groups.poll():
                    settle_ready_groups(self._app)
            except MachineryError as error:
                logger.debug("maintenance could not be done: %s", error)
            except Exception:  # the loop must live on, whatever a store or a handler does
                logger.exception("maintenance failed")
            now = time.monotonic()
            pause = min(
                self._beat_at - now, self._tend_at - now, LONGEST_SLEEP, self._groups.due_in()
            )
            self.loop.pause(max(0.02, pause))

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + self.beat_every
        try:
            if not self._session.beat():
                logger.warning(
                    "this worker has lost its lease (it gave no sign of life for that long: was it "
                    "stopped?): what it ran belongs to others now"
                )
                self._receiver.hand_back()  # its new owner runs it
                for execution in self._executors.running():
                    self._executors.cancel(execution)
        finally:
            self._on_beat()  # alive, whatever the store says

    def _tend_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._tend_at:
            self._tend_at = now + 1.0  # if `tend` fails
            self._tend_at = time.monotonic() + self._app.store.tend()
        if now >= self._groups_at:
            self._groups_at = now + GROUPS_EVERY
            settle_ready_groups(self._app)
            self._groups.adopt()

    def _look_after(self) -> None:
        """Cancel what was lost or revoked while it ran; give back what waits behind long tasks."""
        running = self._executors.running()
        for execution in running:
            context = execution.context
            if (
                context is not None
                and not (context.cancelled or execution.acked)
                and self._session.consumer.is_lost(execution.delivery)
            ):
                self._executors.cancel(execution)
        self._stop_revoked()
        if len(running) >= self._executors.concurrency:
            long_ago = time.perf_counter() - STALE
            if all(0 < execution.call_started < long_ago for execution in running):
                self._receiver.hand_back()

    def _stop_revoked(self) -> None:
        """Ask revoked tasks that run to stop, and end those that have not begun."""
        held = {
            one.signature.uuid: one
            for one in self._receiver.held()
            if not one.is_over and not one.revoked
        }
        for uuid, is_over in (revoked_among(self._app, list(held)) if held else {}).items():
            if held[uuid].withdraw(is_over=is_over):
                self._settler.put(held[uuid])
        for execution in self._executors.running():
            if execution.revoked and not (
                execution.context is not None and execution.context.cancelled
            ):
                self._executors.cancel(execution)
