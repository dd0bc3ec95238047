"""The inside of a task process: the main thread runs jobs, a second thread obeys the worker.

Time: TIME_IS_UP sets `Context.cancelled` and sends the main thread a signal, whose handler raises
TimeLimitExceeded in the task. So sleep() and I/O are interrupted. Inside this library and `logging`
the handler raises nothing (worker/interrupts.py), and the signal is sent again until it has. A
coroutine is cancelled instead. A task that deals with it and returns in time has succeeded.

The end: when the tasks pipe is closed, in order; when the control pipe is closed, at once.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from machinery_py.app import Application
from machinery_py.brokers.base import Delivery
from machinery_py.connections import descriptors, forks, proc
from machinery_py.errors import TaskNotRegistered, TimeLimitExceeded
from machinery_py.registry.outcomes import Failed, Outcome
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.execution import Execution
from machinery_py.worker.frames import (
    TIME_IS_UP,
    Done,
    FrameReader,
    FrameWriter,
    Job,
    Order,
    PipeEnd,
    Progress,
)
from machinery_py.worker.hooks import WorkerHooks
from machinery_py.worker.interrupts import is_boundary, may_interrupt
from machinery_py.worker.runner import outcome_of, outcome_of_async

if TYPE_CHECKING:
    import asyncio

logger = get_logger(__name__)

# Ignored by default, so rarely used by others, and harmless if a task has replaced the handler.
SIGNAL = signal.SIGURG if hasattr(signal, "SIGURG") else signal.SIGTERM
RETRY = 0.02  # seconds until the signal is sent again
BROKEN = 1  # exit code of a process whose pipes were closed


class JobLoop:
    """The jobs of this process, one at a time. `run` is called in the main thread."""

    def __init__(
        self,
        app: Application,
        tasks: FrameReader[Job],
        control: FrameReader[Order],
        replies: FrameWriter,
        *,
        tells_memory: bool,
    ) -> None:
        self._app = app
        self._tasks = tasks
        self._control = control
        self._replies = replies
        self._tells_memory = tells_memory
        self._hooks = WorkerHooks()
        self._lock = threading.Lock()
        self._job: Job | None = None  # that runs
        self._execution: Execution | None = None
        self._order: Order | None = None  # the last
        self._reached = 0  # number of the last job that orders reach, or that is over
        self._late = 0  # number of the job that is still to be told that its time is up
        self._runner: asyncio.Runner | None = None
        self._coroutine: asyncio.Task[Any] | None = None
        self._main = threading.get_ident()

    def run(self) -> None:
        """Run jobs until the worker has closed the pipe."""
        forks.handle(SIGNAL, self._on_signal)
        threading.Thread(target=self._obey, name="machinery-control", daemon=True).start()
        while True:
            try:
                job = self._tasks.read()
            except PipeEnd:
                break
            if job is not None:
                outcome = self._outcome(job)
                self._reached = job.number
                self._reply(Done(job.number, outcome, proc.memory() if self._tells_memory else 0))
        if self._runner is not None:
            self._runner.close()

    # The main thread

    def _outcome(self, job: Job) -> Outcome:
        delivery = Delivery(
            body=job.body, queue=job.queue, receipt=None, fence=job.fence, epoch=job.epoch
        )
        execution = Execution(self._app, self._hooks, delivery, job.worker)
        signature = decode_signature(job.body)
        execution.signature = (
            signature if signature.uuid == job.uuid else signature.replace(uuid=job.uuid)
        )
        execution.take(self._app.registry.find(signature.name))
        if execution.task is None:
            error = TaskNotRegistered(signature.name, self._app.registry.names())
            return Failed(
                error=f"{error} in its process, which imports the app anew",
                error_type="TaskNotRegistered",
                retryable=False,
            )
        self._job, self._execution = job, execution
        outcome = self._call(execution)
        self._job = self._execution = self._coroutine = None
        is_cancelled = isinstance(outcome, Failed) and outcome.error_type.endswith("CancelledError")
        if is_cancelled and execution.is_async and self._is_up(job):
            return execution.failed(_time_is_up(job))
        return outcome

    @is_boundary
    def _call(self, execution: Execution) -> Outcome:
        try:
            if execution.is_async:
                return self._await(execution)
            return contextvars.copy_context().run(outcome_of, execution, self._report)
        except BaseException as error:  # the time was up after the call, or outside of it
            return execution.failed(error)

    def _await(self, execution: Execution) -> Outcome:
        import asyncio  # only processes with coroutine tasks pay

        async def work() -> Outcome:
            self._coroutine = asyncio.current_task()
            return await outcome_of_async(execution, self._report)

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(work(), context=contextvars.copy_context())

    def _report(self, execution: Execution) -> None:
        """Apply an order that came before the task had its context; pass its progress on."""
        job, order, progress = self._job, self._order, execution.progress
        noted = execution.context.noted if execution.context is not None else {}
        if job is None or execution is not self._execution:
            return  # a thread that the task has left
        if order is not None and order.number == job.number:
            self._apply(order, execution)
        self._reached = job.number
        if progress is not None or noted:
            self._reply(Progress(job.number, progress, noted))

    def _reply(self, record: Done | Progress) -> None:
        if descriptors.broken():
            logger.critical("a task has closed descriptors of its process: ending at once")
            os._exit(BROKEN)
        try:
            with self._lock:
                self._replies.write(record)
        except PipeEnd:  # the worker is gone
            os._exit(BROKEN)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        job = self._job
        if (
            job is not None
            and self._late == job.number
            and frame is not None
            and frame.f_code is not JobLoop._call.__code__
            and may_interrupt(frame)
        ):
            self._late = 0
            raise _time_is_up(job)

    # The control thread

    def _obey(self) -> None:
        deadline: float | None = None
        while True:
            try:
                order = self._control.read(deadline)
            except PipeEnd:
                os._exit(BROKEN)
            job, execution = self._job, self._execution
            if order is not None:
                self._order = order
                if job is not None and execution is not None and job.number == order.number:
                    self._apply(order, execution)
            if job is not None and self._late == job.number:
                signal.pthread_kill(self._main, SIGNAL)
                deadline = time.monotonic() + RETRY
            elif self._order is not None and self._order.number > self._reached:
                deadline = time.monotonic() + RETRY  # `_report` will apply it, and set `_late`
            else:
                deadline = None

    def _apply(self, order: Order, execution: Execution) -> None:
        execution.cancel(time_is_up=order.what == TIME_IS_UP)
        coroutine = self._coroutine
        if coroutine is not None:
            coroutine.get_loop().call_soon_threadsafe(coroutine.cancel)
        elif order.what == TIME_IS_UP and not execution.is_async:
            self._late = order.number

    def _is_up(self, job: Job) -> bool:
        order = self._order
        return order is not None and order.number == job.number and order.what == TIME_IS_UP


def _time_is_up(job: Job) -> TimeLimitExceeded:
    return TimeLimitExceeded(f"ran longer than its time limit of {job.time_limit:g} s")
