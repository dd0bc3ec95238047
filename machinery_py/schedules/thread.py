"""SchedulerThread: the thread that carries the scheduler in a worker. It sleeps until something is due, or it is time to look."""

from __future__ import annotations

import threading

from machinery_py.app import Application
from machinery_py.errors import MachineryError, Unsupported
from machinery_py.schedules.scheduler import Declared, Scheduler
from machinery_py.texts import get_logger

logger = get_logger(__name__)

PATIENCE = 1.0, 10.0  # seconds until the next try after a failure, the first and the longest


class SchedulerThread:
    """Started and closed by its worker."""

    def __init__(self, app: Application, declared: Declared, *, name: str) -> None:
        self._stop = threading.Event()
        self._scheduler = Scheduler(app, declared, stopping=self._stop.is_set)
        self._declared = declared
        self._thread = threading.Thread(target=self._work, name=f"{name}-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send no further tick. Does not wait for one that is being sent."""
        self._stop.set()

    def close(self) -> None:
        self.stop()
        self._thread.join(timeout=10.0)

    def _work(self) -> None:
        pause, failures = 0.0, 0
        while not self._stop.wait(pause):
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
