"""Thread that runs the scheduler in a worker; it sleeps until something is due."""

from __future__ import annotations

from machinery_py.app import Application
from machinery_py.errors import MachineryError, Unsupported
from machinery_py.schedules.scheduler import Declared, Scheduler
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread

logger = get_logger(__name__)

PATIENCE = 1.0, 10.0  # seconds until the next try after a failure, the first and the longest


class SchedulerThread(LoopThread):
    """Thread of a scheduler. After `stop` no further tick is sent."""

    def __init__(self, app: Application, declared: Declared, *, name: str) -> None:
        super().__init__(f"{name}-scheduler", self._work)
        self._scheduler = Scheduler(app, declared, stopping=self.is_stopping)
        self._declared = declared

    def _work(self) -> None:
        pause, failures = 0.0, 0
        while not self.pause(pause):
            try:
                pause, failures = self._scheduler.step(), 0
                continue
            except Unsupported as error:
                if len(self._declared):
                    logger.error("no schedule will be sent by this worker: %s", error)
                return
            except MachineryError as error:
                logger.warning("the scheduler could not work: %s", error)
            except Exception:  # the loop must live on, whatever a store or a hook does
                logger.exception("the scheduler failed")
            failures += 1
            pause = min(PATIENCE[1], PATIENCE[0] * 2 ** min(failures - 1, 8))
