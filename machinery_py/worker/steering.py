"""Functions of the orders to a worker, one for each of KINDS; its agent calls them."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from machinery_py.app import Application
from machinery_py.connections import proc
from machinery_py.control.answers import (
    ActiveTask,
    HeldTask,
    ThreadStack,
    WorkerQueue,
    WorkerStats,
)
from machinery_py.queues import QueueOrder
from machinery_py.texts import cut
from machinery_py.version import __version__
from machinery_py.worker.agent import Handlers
from machinery_py.worker.execution import Execution
from machinery_py.worker.executors import Executors
from machinery_py.worker.receiver import Receiver

MAX_STACK = 20_000  # bytes of one thread's stack
MAX_STACKS = 200  # threads


class Steering:
    """The orders that one worker carries out. Belongs to the thread of its agent."""

    def __init__(
        self,
        app: Application,
        receiver: Receiver,
        executors: Executors,
        *,
        order: QueueOrder,
        pool: str,
        processed: Callable[[], int],
    ) -> None:
        self._app = app
        self._receiver = receiver
        self._executors = executors
        self._order = order
        self._pool = pool
        self._processed = processed
        self._host = proc.hostname()
        self._started_at = app.now()
        self._begun = time.monotonic()

    def handlers(self) -> Handlers:
        """Return the function of each order."""
        return {
            "ping": lambda _: None,  # the answer itself says all
            "stats": self._stats,
            "active": self._active,
            "reserved": self._reserved,
            "registered": lambda _: self._app.registry.names(),
            "config": lambda _: self._app.config.redacted(),
            "queues": self._queues,
            "stack": self._stack,
        }

    def _stats(self, _: object) -> WorkerStats:
        return WorkerStats(
            host=self._host,
            pid=os.getpid(),
            version=__version__,
            python=platform.python_version(),
            platform=sys.platform,
            started_at=self._started_at,
            uptime=time.monotonic() - self._begun,
            concurrency=self._executors.concurrency,
            pool=self._pool,
            active=len(self._executors.running()),
            held=len(self._receiver.held()),
            processed=self._processed(),
            connected=self._receiver.connected,
            memory=proc.memory(),
            load=os.getloadavg() if hasattr(os, "getloadavg") else None,
            threads=threading.active_count(),
            events=self._app.publisher.is_on,
        )

    def _active(self, _: object) -> list[ActiveTask]:
        threads = {one.ident: one.name for one in threading.enumerate()}
        return [
            ActiveTask(
                **_task_of(one),
                started_at=one.started_at,
                seconds=time.perf_counter() - one.call_started,
                place=self._executors.place_of(one) or threads.get(one.thread_id, "?"),
                cancelled=one.context is not None and one.context.cancelled,
            )
            for one in self._executors.running()
        ]

    def _reserved(self, _: object) -> list[HeldTask]:
        waiting = [one for one in self._receiver.held() if not one.call_started and not one.is_over]
        return [HeldTask(**_task_of(one)) for one in waiting]

    def _queues(self, _: object) -> list[WorkerQueue]:
        weights = self._order.weights or [0.0] * len(self._order.names)
        return [
            WorkerQueue(name=name, weight=weight)
            for name, weight in zip(self._order.names, weights, strict=True)
        ]

    def _stack(self, _: object) -> list[ThreadStack]:
        tasks = {
            one.thread_id: one.signature.uuid
            for one in self._executors.running()
            if not one.is_async
        }
        threads = {one.ident: one.name for one in threading.enumerate()}
        return [
            ThreadStack(
                thread=threads.get(number, str(number)),
                task=tasks.get(number, ""),
                stack=cut("".join(traceback.format_stack(frame)), MAX_STACK),
            )
            for number, frame in list(sys._current_frames().items())[:MAX_STACKS]
        ]


def _task_of(execution: Execution) -> dict[str, Any]:
    signature = execution.signature
    return {
        "uuid": signature.uuid,
        "name": signature.name,
        "queue": execution.delivery.queue,
        "attempt": signature.attempt,
    }
