"""Functions of the orders to a worker, one for each of KINDS; its agent calls them."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.connections import proc
from machinery_py.control.answers import (
    ActiveTask,
    HeldTask,
    ThreadStack,
    WorkerQueue,
    WorkerStats,
)
from machinery_py.control.orders import (
    AddQueue,
    CancelQueue,
    Find,
    SetTimeLimit,
    Terminate,
    contains,
)
from machinery_py.errors import MachineryError
from machinery_py.names import check_queue
from machinery_py.queues import PLAIN, QueueOrder
from machinery_py.revocation import revoked_among
from machinery_py.tasks.signature import Arg
from machinery_py.texts import cut, get_logger, quoted
from machinery_py.version import __version__
from machinery_py.worker.control.agent import Handlers
from machinery_py.worker.loops.receiver import Receiver
from machinery_py.worker.loops.settler import Settler
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.executors import Executors

PACKAGE = "machinery_py"  # the logger of all our modules
MAX_STACK = 16_000  # bytes of one thread's stack
MAX_STACKS = 200  # threads
MAX_CALL = 2_048  # bytes of a message whose arguments are told
MAX_CALLS = 32_768  # bytes of all of them: an answer has 65,536
MAX_TOLD = 50  # tasks that the keeper knows of

logger = get_logger(__name__)


class Steering:
    """The orders that one worker carries out. Its agent calls it.

    Args:
        resize: called with another concurrency.
        on_queues: called with the new queues of the worker.
        on_shutdown: called to end it; returns at once.
    """

    def __init__(
        self,
        app: Application,
        worker: str,
        receiver: Receiver,
        executors: Executors,
        settler: Settler,
        *,
        resize: Callable[[int], None],
        on_queues: Callable[[QueueOrder], None],
        on_shutdown: Callable[[], None],
        pool: str,
    ) -> None:
        self._app = app
        self._worker = worker
        self._receiver = receiver
        self._executors = executors
        self._settler = settler
        self._resize = resize
        self._on_queues = on_queues
        self._on_shutdown = on_shutdown
        self._pool = pool
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
            "set_concurrency": lambda given: self._resize(given.concurrency),
            "add_queue": self._add_queue,
            "cancel_queue": self._cancel_queue,
            "set_time_limit": self._set_time_limit,
            "enable_events": lambda _: self._app.publisher.enable(),
            "disable_events": lambda _: self._app.publisher.disable(),
            "restart_pool": lambda _: self._executors.restart_pool(),
            "shutdown": lambda _: self._on_shutdown(),
            "terminate": self._terminate,
            "find": self._find,
            "log_level": lambda given: logging.getLogger(PACKAGE).setLevel(given.level),
        }

    def answers(self) -> dict[str, object]:
        """Return what the keeper (deputy.py) answers with, should the worker fall silent."""
        if not self._app.config.control:
            return {}
        try:
            stats, active = (
                self._stats(None),
                [msgspec.structs.replace(one, args=None) for one in self._active(None)[:MAX_TOLD]],
            )
            return {
                "worker": self._worker,
                **msgspec.to_builtins({"stats": stats, "active": active}),
            }
        except Exception:  # a sign of life must not be late for it
            logger.exception("the keeper cannot be told what the worker does")
            return {}

    def _stats(self, _: object) -> WorkerStats:
        running, now = self._executors.running(), time.perf_counter()
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
            active=len(running),
            held=len(self._receiver.held()),
            oldest=max([now - run.first.call_started for run in running], default=0.0),
            processed=self._settler.processed,
            failed=self._settler.failed,
            connected=self._receiver.connected,
            memory=proc.memory(),
            load=proc.load(),
            threads=threading.active_count(),
            events=self._app.publisher.is_on,
        )

    def _active(self, _: object) -> list[ActiveTask]:
        threads = {one.ident: one.name for one in threading.enumerate()}
        left = MAX_CALLS

        def args_of(one: Execution) -> list[Arg] | None:
            nonlocal left
            size = len(one.delivery.body)
            if size > min(left, MAX_CALL):
                return None
            left -= size
            # Its own are of the wire, and encoded as Go has them.
            return [
                Arg(type=arg.type, value=arg.value, name=arg.name) for arg in one.signature.args
            ]

        return [
            ActiveTask(
                **_task_of(one),
                started_at=one.started_at,
                seconds=time.perf_counter() - run.first.call_started,
                place=self._executors.place_of(run) or threads.get(run.thread_id, "?"),
                cancelled=run.context is not None and run.context.cancelled,
                args=args_of(one),
            )
            for run in self._executors.running()
            for one in run.calls
        ]

    def _reserved(self, _: object) -> list[HeldTask]:
        waiting = [one for one in self._receiver.held() if not one.call_started and not one.is_over]
        return [HeldTask(**_task_of(one)) for one in waiting]

    def _queues(self, _: object) -> list[WorkerQueue]:
        order = self._receiver.order
        weights = order.weights or [0.0] * len(order.names)
        return [
            WorkerQueue(name=name, weight=weight)
            for name, weight in zip(order.names, weights, strict=True)
        ]

    def _stack(self, _: object) -> list[ThreadStack]:
        tasks = {
            run.thread_id: run.signature.uuid
            for run in self._executors.running()
            if not run.is_async
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

    def _add_queue(self, given: AddQueue) -> None:
        order = self._receiver.order
        check_queue(given.name)
        if given.name not in order.names:
            weights = (*order.weights, PLAIN) if order.weights else ()
            self._serve(QueueOrder((*order.names, given.name), weights))

    def _cancel_queue(self, given: CancelQueue) -> None:
        order = self._receiver.order
        if given.name not in order.names:
            return
        if len(order.names) == 1:
            raise MachineryError(f"{quoted(given.name)} is the only queue of this worker")
        kept = [number for number, name in enumerate(order.names) if name != given.name]
        weights = tuple(order.weights[number] for number in kept) if order.weights else ()
        self._serve(QueueOrder(tuple(order.names[number] for number in kept), weights))

    def _serve(self, order: QueueOrder) -> None:
        self._receiver.serve(order)
        self._on_queues(order)

    def _set_time_limit(self, given: SetTimeLimit) -> None:
        task = self._app.registry.get(given.task)
        task.settings = msgspec.structs.replace(task.settings, time_limit=given.seconds)

    def _terminate(self, given: Terminate) -> dict[str, str]:
        wanted, answers = set(given.uuids), dict[str, str]()
        for run in self._executors.running():
            signatures = [one.signature for one in run.calls if one.signature.uuid in wanted]
            revoked = revoked_among(self._app, signatures) if signatures else {}
            if not revoked:
                continue
            for one in run.calls:
                one.revoked = one.revoked or one.signature.uuid in revoked
            if len(revoked) < len(run.calls):
                how = "left"  # no call of a batch can be ended without the others
            else:
                how = "killed" if self._executors.terminate(run) else "asked"
            answers.update(dict.fromkeys(revoked, how))
        return answers

    def _find(self, given: Find) -> list[str]:
        signatures = [one.signature for one in self._receiver.held()]
        return [one.uuid for one in signatures if contains(one.headers, given.headers)]


def _task_of(execution: Execution) -> dict[str, Any]:
    signature = execution.signature
    return {
        "uuid": signature.uuid,
        "name": signature.name,
        "queue": execution.delivery.queue,
        "attempt": signature.attempt,
    }
