"""Time limits: one thread that sleeps until the next running task's time is up."""

from __future__ import annotations

import heapq
import itertools
import threading
import time

from machinery_py.worker.execution import Execution
from machinery_py.worker.executors import Executors

SWEEP = 1000  # deadlines that are kept before those of ended tasks are removed
RETRY = 0.02  # seconds to the next try when a thread must not be interrupted


class TimeLimits:
    """Watch over runs with a time limit. The thread starts with the first of them."""

    def __init__(self, executors: Executors, *, name: str) -> None:
        self._sweep_at = SWEEP
        self._executors = executors
        self._name = name
        self._deadlines: list[tuple[float, int, Execution]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, execution: Execution) -> None:
        """Count the time limit of an execution from now."""
        limit = execution.time_limit
        if limit is None:
            return
        with self._changed:
            heapq.heappush(
                self._deadlines, (time.monotonic() + limit, next(self._numbers), execution)
            )
            if len(self._deadlines) >= self._sweep_at:
                self._sweep()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"{self._name}-limits", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def _sweep(self) -> None:
        """Remove ended tasks: behind one that runs for hours a million others may have ended."""
        self._deadlines = [one for one in self._deadlines if not one[2].is_over]
        heapq.heapify(self._deadlines)
        self._sweep_at = max(SWEEP, 2 * len(self._deadlines))

    def _work(self) -> None:
        while True:
            all_told = self._executors.interrupt()
            with self._changed:
                while self._deadlines and self._deadlines[0][2].is_over:
                    heapq.heappop(self._deadlines)
                if self._closed:
                    return
                pause = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
                if pause is None or pause > 0:
                    self._changed.wait(pause if all_told else min(pause or RETRY, RETRY))
                    continue
                _, _, execution = heapq.heappop(self._deadlines)
            limit = execution.time_limit
            if limit is not None and execution.time_out(limit):
                self._executors.abandon(execution)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
