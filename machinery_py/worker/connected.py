"""Parts of a worker around one session: they exist together, from its connection to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from machinery_py.config.config import Config
from machinery_py.errors import MachineryError
from machinery_py.stores.base import Session
from machinery_py.tasks.states import STARTED
from machinery_py.texts import get_logger
from machinery_py.worker.control.signs import Signs
from machinery_py.worker.control.steering import Steering
from machinery_py.worker.loops.maintenance import Maintenance
from machinery_py.worker.loops.receiver import Receiver
from machinery_py.worker.loops.settler import Settler
from machinery_py.worker.running.executors import Executors
from machinery_py.worker.stopping import StopRequest

logger = get_logger(__name__)

SETTLER_WAIT = 2.0  # seconds for a task that has ended to reach the settler


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Parts around one session of a worker. Whoever has it, has all of them."""

    session: Session
    signs: Signs | None
    settler: Settler
    executors: Executors
    receiver: Receiver
    maintenance: Maintenance
    steering: Steering

    @property
    def is_ready(self) -> bool:
        """Whether tasks can be received and settled."""
        receiver = self.receiver
        return receiver.connected and not receiver.loop.is_stopping() and self.settler.healthy

    @property
    def failure(self) -> BaseException | None:
        """The error that ended a thread which the worker cannot do without; None: all live."""
        return (
            self.receiver.loop.failure
            or self.settler.loop.failure
            or self.maintenance.timer.failure
            or self.executors.limits.failure
        )

    def tell_signs(self, queues: Sequence[str], config: Config) -> None:
        """Tell the keeper which queues the session serves."""
        if self.signs is not None:
            self.signs.keep(self.session.consumer, queues, config, self.steering.answers)

    def blame(self) -> None:
        """Give a strike to all begun tasks that are not settled."""
        for execution in self.receiver.held():
            if execution.phase is STARTED:  # not one that waits in its slot
                self.session.consumer.run_begins(execution.delivery)

    def drain(self, request: StopRequest, timeout: float) -> None:
        """Claim no more, let running tasks end in time, and give back those that do not."""
        try:
            self.receiver.stop()
            self.receiver.hand_back()
            _wait_while(
                lambda: bool(self.executors.busy()) and not request.is_abrupt, timeout, request
            )
        finally:  # also by Ctrl+C
            self._hand_over(request)

    def _hand_over(self, request: StopRequest) -> None:
        """Give back what still runs; what has ended gets to the settler."""
        unfinished = self.receiver.hand_back(started=True)
        for run in self.executors.running():
            self.executors.cancel(run)
        # Ended tasks must be with the settler before it is closed.
        _wait_while(lambda: self.executors.are_ending(unfinished), SETTLER_WAIT, request)
        back = [one.signature.uuid for one in unfinished if not one.is_final]
        if back:
            logger.warning(
                "%d unfinished tasks go back to their queues: %s", len(back), ", ".join(back[:5])
            )

    def close(self) -> None:
        """Sign off."""
        try:
            self.session.close()
        except MachineryError as error:
            logger.warning("this worker could not sign off, and will be found gone: %s", error)
        if self.signs is not None:
            self.signs.drop(self.session.consumer)


def _wait_while(is_so: Callable[[], bool], timeout: float, request: StopRequest) -> None:
    deadline = time.monotonic() + timeout
    while is_so() and time.monotonic() < deadline:
        request.wait(0.02)
