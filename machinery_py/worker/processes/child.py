"""The inside of a task process: the main thread runs jobs, a second thread obeys the worker.

Time: TIME_IS_UP sets `Context.cancelled` and sends the main thread a signal, whose handler raises
TimeLimitExceeded in the task. So sleep() and I/O are interrupted. Inside this library and `logging`
the handler raises nothing (worker/running/interrupts.py), and the signal is sent again until it
has. A coroutine is cancelled instead. A task that deals with it and returns in time has succeeded.

The end: when the tasks pipe is closed, in order; when the control pipe is closed, at once.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from machinery_py.app import Application
from machinery_py.brokers.base import Delivery
from machinery_py.connections import descriptors, forks, proc, streams
from machinery_py.errors import (
    BackendUnavailable,
    StepLost,
    StepRefused,
    TaskNotRegistered,
    TimeLimitExceeded,
    Unsupported,
    for_good,
)
from machinery_py.receipts import NO_RECEIPT
from machinery_py.registry.outcomes import Batched, Failed, Outcome
from machinery_py.tasks.checkpoints import Checkpoint
from machinery_py.tasks.context import NO_STATE
from machinery_py.tasks.mailboxes import Received, Wanted
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.admission.batches import BatchRun
from machinery_py.worker.lifespans import lifespans
from machinery_py.worker.processes.frames import (
    TIME_IS_UP,
    Done,
    FrameReader,
    FrameWriter,
    Job,
    JobCall,
    Keep,
    KeepReply,
    Order,
    PipeEnd,
    Progress,
    Ready,
    Waits,
)
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks, text_of, type_name_of
from machinery_py.worker.running.interrupts import is_boundary, may_interrupt
from machinery_py.worker.running.runner import Run, outcome_of, outcome_of_async, over_limit

if TYPE_CHECKING:
    import asyncio

logger = get_logger(__name__)

# Ignored by default, so rarely used by others, and harmless if a task has replaced the handler.
SIGNAL = signal.SIGURG if hasattr(signal, "SIGURG") else signal.SIGTERM
RETRY = 0.02  # seconds until the signal is sent again
BROKEN = 1  # exit code of a process whose pipes were closed


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _CurrentJob:
    """Job, and what an order for it needs. One record, so that no order meets another job's task.

    Attributes:
        is_open: orders can be applied, as the task has its context.
        order: the last that was applied.
        is_late: the main thread is still to be told that the time is up.
    """

    job: Job
    run: Run
    coroutine: asyncio.Task[Any] | None = None
    is_open: bool = False
    order: Order | None = None
    is_late: bool = False

    def is_up(self) -> bool:
        return self.order is not None and self.order.what == TIME_IS_UP

    def exceeded(self) -> TimeLimitExceeded:
        return TimeLimitExceeded(over_limit(self.job.time_limit))


class JobLoop:
    """The jobs of this process, one at a time. `run` is called in the main thread."""

    def __init__(
        self,
        app: Application,
        tasks: FrameReader[Job],
        control: FrameReader[Order | KeepReply],
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
        self._hooks.run_coroutine = self._run_coroutine
        self._lock = threading.Lock()
        self._current: _CurrentJob | None = None
        self._questions = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[KeepReply]] = {}
        self._order: Order | None = None  # the last that came, perhaps before its job was read
        self._runner: asyncio.Runner | None = None
        self._main = threading.get_ident()

    def run(self) -> None:
        """Say that this process is ready, and run jobs until the worker has closed the pipe.

        Raises:
            MachineryError: a lifespan of the app cannot start; nothing was said.
        """
        forks.handle(SIGNAL, self._on_signal)
        with lifespans(self._app.hooks.lifespans, self._run_coroutine) as self._hooks.state:
            self._replies.write(Ready())
            self._run_jobs()
        if self._runner is not None:
            self._runner.close()

    def _run_jobs(self) -> None:
        threading.Thread(target=self._obey, name="machinery-control", daemon=True).start()
        while True:
            try:
                job = self._tasks.read()
            except PipeEnd:
                break
            if job is not None:
                streams.drop_unread()  # a task that prints must not fail of it
                publisher = self._app.publisher
                publisher.follow(job.clock)
                outcome, handed_on = self._outcome(job)
                memory = proc.memory() if self._tells_memory else 0
                clock = publisher.clock_to_send()
                try:
                    self._reply(Done(job.number, outcome, memory, clock, handed_on))
                except Exception as error:  # of the encoder, for what user code has made
                    self._reply(Done(job.number, _unsendable(error), memory))

    # The main thread

    def _outcome(self, job: Job) -> tuple[Outcome, Mapping[str, str]]:
        """Return what became of the call, and what its handlers have handed on."""
        calls = [self._execution(call, job.worker) for call in job.calls]
        run = BatchRun(calls) if job.is_batch else Run(calls[0])
        run.slots, run.thread_id, run.keeper = self, self._main, _WorkerKeeper(self, job.number)
        if run.first.task is None:
            error = TaskNotRegistered(run.signature.name, self._app.registry.names())
            text = f"{error} in its process, which imports the app anew"
            return Failed(error=text, error_type="TaskNotRegistered", retryable=False), NO_STATE
        self._current = current = _CurrentJob(job, run)
        outcome = self._call(run)
        self._current = None
        ends = outcome.outcomes if isinstance(outcome, Batched) else [outcome]
        is_cancelled = any(
            isinstance(one, Failed) and one.error_type.endswith("CancelledError") for one in ends
        )
        if is_cancelled and current.is_up():
            outcome = run.failed(current.exceeded())
        return outcome, NO_STATE if run.context is None else run.context.handed_on

    def _execution(self, call: JobCall, worker: str) -> Execution:
        delivery = Delivery(
            body=call.body, queue=call.queue, receipt=NO_RECEIPT, count=call.count, fence=call.fence
        )
        execution = Execution(self._app, self._hooks, delivery, worker)
        signature = decode_signature(call.body)
        execution.signature = (
            signature if signature.uuid == call.uuid else signature.replace(uuid=call.uuid)
        )
        execution.take(self._app.registry.find(signature.name))
        return execution

    @is_boundary
    def _call(self, run: Run) -> Outcome:
        try:
            if run.is_async:
                return self._await(run)
            return contextvars.copy_context().run(outcome_of, run, self._report)
        except BaseException as error:  # the time was up before the call, after it, or outside
            self._current = None  # no signal ends what follows
            return run.failed(error)

    def _await(self, run: Run) -> Outcome:
        import asyncio  # only processes with coroutine tasks pay

        async def work() -> Outcome:
            assert self._current is not None
            self._current.coroutine = asyncio.current_task()
            return await outcome_of_async(run, self._report)

        return self._run_coroutine(work())

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine, context=contextvars.copy_context())

    def _report(self, run: Run) -> None:
        """Let orders reach the task, which has begun; pass its progress on."""
        current = self._current
        if current is None or run is not current.run:
            return  # a thread that the task has left
        if not current.is_open:
            current.is_open = True
            self._apply(self._order, current)
            if current.is_late:  # no signal, nor the call
                raise current.exceeded()
        else:
            self._reply(Progress(current.job.number, run.first.progress, run.first.noted))

    def _reply(self, record: Done | Progress | Waits | Keep) -> None:
        if descriptors.broken():
            logger.critical("a task has closed descriptors of its process: ending at once")
            os._exit(BROKEN)
        try:
            with self._lock:
                self._replies.write(record)
        except PipeEnd:  # the worker is gone
            os._exit(BROKEN)

    def ask(
        self, job: int, new: Mapping[str, Checkpoint] | None, wanted: Wanted | None = None
    ) -> KeepReply:
        """Return the worker's answer about a job's checkpoints or signal. For any thread."""
        question = next(self._questions)
        answer = self._answers[question] = queue.SimpleQueue[KeepReply]()
        self._reply(Keep(job, question, None if new is None else dict(new), wanted))
        return answer.get()

    # Waiting for other tasks: the worker lends the slot. See `worker.running.runner.SlotLender`

    def wait_begins(self, run: Run) -> None:
        run.waits += 1
        self._tell_wait(run, begins=True)

    def wait_ends(self, run: Run, *, at_once: bool) -> None:
        run.waits -= 1
        self._tell_wait(run, begins=False)

    async def wait_ends_async(self, run: Run, *, at_once: bool) -> None:
        self.wait_ends(run, at_once=at_once)

    def _tell_wait(self, run: Run, *, begins: bool) -> None:
        current = self._current
        if current is not None and current.run is run and run.waits == begins:
            self._reply(Waits(current.job.number, begins))

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        current = self._current
        if (
            current is not None
            and current.is_late
            and frame is not None
            and frame.f_code is not JobLoop._call.__code__
            and may_interrupt(frame)
        ):
            current.is_late = False
            raise current.exceeded()

    # The control thread

    def _obey(self) -> None:
        deadline: float | None = None
        while True:
            try:
                order = self._control.read(deadline)
            except PipeEnd:
                os._exit(BROKEN)
            if isinstance(order, KeepReply):
                self._answers.pop(order.question).put(order)
            elif order is not None:
                self._order = order
            deadline, current = None, self._current
            if current is not None and current.is_open:  # else `_report` applies it
                self._apply(self._order, current)
                if current.is_late:
                    signal.pthread_kill(self._main, SIGNAL)
                    deadline = time.monotonic() + RETRY

    def _apply(self, order: Order | None, current: _CurrentJob) -> None:
        """Apply the order, unless it is for another job, or was applied."""
        with self._lock:
            if order is None or order.number != current.job.number or order is current.order:
                return
            current.order = order
        current.run.cancel(time_is_up=current.is_up())
        if current.coroutine is not None:
            current.coroutine.get_loop().call_soon_threadsafe(current.coroutine.cancel)
        else:
            current.is_late = current.is_up()


class _WorkerKeeper:
    """Keeper of the checkpoints of a job: the worker keeps them, which has the delivery."""

    def __init__(self, loop: JobLoop, job: int) -> None:
        self._loop = loop
        self._job = job

    def read(self) -> dict[str, Checkpoint]:
        return self._ask(None).rows

    def keep(self, new: Mapping[str, Checkpoint]) -> Mapping[str, Checkpoint]:
        return self._ask(new).rows

    def receive(self, wanted: Wanted) -> Received:
        return self._ask(None, wanted).received or Received()

    def _ask(self, new: Mapping[str, Checkpoint] | None, wanted: Wanted | None = None) -> KeepReply:
        answer = self._loop.ask(self._job, new, wanted)
        match answer.error_type:
            case "":
                return answer
            case StepLost.__name__:
                raise StepLost(answer.error)
            case StepRefused.__name__:
                raise StepRefused(answer.error)
            case Unsupported.__name__:
                raise for_good(Unsupported(answer.error))
            case _:
                raise BackendUnavailable(answer.error)


def _unsendable(error: Exception) -> Failed:
    return Failed(
        error=f"what follows the task cannot be sent: {text_of(error)}",
        error_type=type_name_of(error),
        retryable=False,
    )
