"""Running a task: pass the guards, make the call, finish what it is of.

    run_here        the call is made in this thread
    run_async       the same, for a coroutine function on the running loop
    run_elsewhere   the call is made by a task process (worker/processes/pool.py)

`outcome_of` and `outcome_of_async` are the call: arguments, hooks, function, result. Whatever user
code raises becomes an outcome there. A task process makes the call with the same two functions.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextvars import Token
from typing import Any, Protocol

from machinery_py.brokers.base import Consumer
from machinery_py.errors import ArgumentError, DecodeError, Suspended, TimeLimitExceeded
from machinery_py.registry.calls import REFLECT
from machinery_py.registry.chunks import each, each_async, is_chunk, result_of_chunk, rows_of
from machinery_py.registry.options import TaskSettings
from machinery_py.registry.outcomes import REVOKED, Failed, Outcome, Succeeded
from machinery_py.tasks.context import NO_STATE, Context, enter, leave
from machinery_py.tasks.context import Report as ContextReport
from machinery_py.tasks.signature import Signature
from machinery_py.tasks.states import STARTED
from machinery_py.texts import get_logger
from machinery_py.transactions import entered
from machinery_py.wire.signatures import decode_exact
from machinery_py.wire.states import encode_results
from machinery_py.worker.admission.guards import ExecutionGuard, pass_async
from machinery_py.worker.loops.timer import TimerEntry
from machinery_py.worker.running.checkpoints import Checkpoints
from machinery_py.worker.running.execution import Execution, settlement_of
from machinery_py.worker.running.failures import failed, judged
from machinery_py.worker.running.hooks import await_around, await_between, call_around, call_between
from machinery_py.worker.running.keeping import StepKeeper, StoreKeeper
from machinery_py.worker.running.transactions import begin, commit, roll_back

logger = get_logger(__name__)

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/running/executors.py

# What `_begin` returns: the call, ready to be made, and how the task's context is left.
_Begun = tuple[Callable[[], Any], Token[Context | None]]
#: Arguments of a function, by place and by name.
Arguments = tuple[list[Any], dict[str, Any]]


class SlotLender(Protocol):
    """Lender of the slots of runs that wait for other tasks; see worker/running/slots.py."""

    def wait_begins(self, run: Run, /) -> None: ...
    def wait_ends(self, run: Run, /, *, at_once: bool) -> None: ...
    async def wait_ends_async(self, run: Run, /, *, at_once: bool) -> None: ...


class Run:
    """Call of a task's function, for one execution; BatchRun (batches.py) is one for several.

    Attributes:
        calls: the executions that it is for; `listed` are those of them that the function gets.
        first: one of them, for what they have in common.
        consumer: holds its deliveries; None: nobody is told when they are run.
        context: None before the function is called.
        alarm: of its time limit, in a thread or on the loop.
        in_process: a task process makes the call.
        waits: for results of other tasks: of a coroutine task, several at a time.
        keeper: of its checkpoints, in a task process; else their store is.
    """

    __slots__ = (
        "_steps",
        "alarm",
        "calls",
        "consumer",
        "context",
        "first",
        "in_process",
        "is_batch",
        "keeper",
        "listed",
        "settings",
        "signature",
        "slots",
        "thread_id",
        "waits",
    )

    def __init__(self, execution: Execution) -> None:
        self.is_batch: bool = False
        self.first: Execution = execution
        self.calls: Sequence[Execution] = (execution,)
        self.listed: Sequence[Execution] = self.calls
        self.signature: Signature[Any] = execution.signature
        self.settings: TaskSettings = execution.settings
        self.consumer: Consumer | None = None
        self.context: Context | None = None
        self.alarm: TimerEntry | None = None
        self.in_process: bool = False
        self.slots: SlotLender | None = None
        self.thread_id: int = 0
        self.waits: int = 0
        self.keeper: StepKeeper | None = None
        self._steps: Checkpoints | None = None

    @property
    def is_over(self) -> bool:
        return self.first.is_over

    @property
    def placed(self) -> Sequence[Execution]:
        """The calls that no guard has stopped."""
        return self.calls

    def leave_out_unbegun(self) -> None:
        """Leave out the calls of a batch that were handed back or revoked before."""

    def pass_guard(self, on_lost: Callable[[], object] | None = None) -> bool:
        """Let it in by its limits, lock and key, and commit an early start. False: it is over.

        Args:
            on_lost: called when its lock or a slot is lost while it runs; by default `cancel`.
        """
        one = self.first
        guard = one.guard = one.guard or ExecutionGuard(one)
        is_in = guard.enter(one, on_lost or self.cancel)
        self.signature = one.signature
        if is_in and not self.in_process:
            self.note_begun()
        return is_in

    @property
    def begins_at_once(self) -> bool:
        """Whether nothing is between its slot and the call: no guard, no process to be found."""
        return not (self.in_process or self.is_batch or self.first.is_guarded)

    def note_begun(self) -> None:
        """Let the death of this worker be a strike of its calls, from now on."""
        if self.consumer is not None:
            for one in self.placed:
                self.consumer.run_begins(one.delivery)

    def note_over(self) -> None:
        """Let the death of this worker be no strike of its calls any more."""
        if self.consumer is not None:
            for one in self.calls:
                self.consumer.run_ends(one.delivery)

    def arguments(self) -> Arguments | Outcome:
        """Return the arguments of the function, or what the call ends with if they are wrong."""
        task, signature = self.first.task, self.first.signature
        assert task is not None
        try:
            if signature.headers and is_chunk(signature):
                return [rows_of(task.call, signature)], {}
            return task.call.values(signature.args)
        except ArgumentError as error:
            # As Go: wrong arguments will not get better, so there is no retry.
            return misfit(_as_go_says(self.first, error))

    def new_context(self, report: ContextReport | None = None) -> Context:
        """Let a new context be that of the task, with what the one before has handed on."""
        one, delivery = self.first, self.first.delivery
        self.context = one.context = Context(
            self.signature,
            queue=delivery.queue,
            delivery=delivery.count,
            fence=delivery.fence,
            worker=one.worker,
            state=one.hooks.state,
            noted=one.noted,
            handed_on=NO_STATE if one.context is None else one.context.handed_on,
            report=report,
            run=self,
            connection=one.transaction and one.transaction.own.connection,
        )
        return self.context

    def cancel(self, *, time_is_up: bool = False) -> None:
        """Ask the function to stop; it has to check `Context.cancelled`."""
        if self.context is not None:
            self.context.cancel(time_is_up=time_is_up)

    # Its end

    def succeeded(self, value: Any) -> Outcome:
        """Return the outcome of what the function returned."""
        one, task = self.first, self.first.task
        assert task is not None
        if self._steps is not None and (broken := self._steps.broken) is not None:
            if isinstance(broken, Suspended):
                _log_caught(self.signature, broken)
            return self.failed(broken)
        if value is None or (one.settings.ignore_result and not _passes_on(one)):
            return Succeeded(())
        try:
            if one.signature.headers and is_chunk(one.signature):
                results = result_of_chunk(task.call, value)
            else:
                results = task.call.results(value)
        except ArgumentError as error:
            return misfit(str(error))
        if type(value) is not int:
            limit = one.app.config.max_result_size
            size = len(encode_results(results))
            if size > limit:
                return misfit(
                    f"the result has {size:,} bytes, more than max_result_size = {limit:,} "
                    "(store it elsewhere and return where)"
                )
        return Succeeded(results)

    def failed(self, error: BaseException) -> Outcome:
        """Return the outcome of what was raised."""
        if self._steps is not None and (broken := self._steps.broken) is not None:
            if isinstance(broken, Suspended) and error is not broken:
                _log_raised(self.signature, error)
            error = broken
        return failed(self.first, error)

    def judged(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a call in another process, with what is known only here."""
        return judged(self.first, outcome)

    def finish(self, outcome: Outcome) -> bool:
        """End each call that has not ended. False: there is none."""
        return self.first.settle(*settlement_of(self.first, outcome))

    def time_out(self, limit: float) -> bool:
        """End it because its time is up. False: it has ended."""
        self.cancel(time_is_up=True)
        return self.finish(self.failed(TimeLimitExceeded(over_limit(limit))))

    def terminate(self) -> bool:
        """End it as revoked, if it can be killed. False: it can only be asked to stop."""
        for one in self.calls:
            one.revoked = True
        return self.in_process and self.finish(REVOKED)

    def break_off(self, error: BaseException) -> None:
        """End it as failed, unless it has ended: something failed outside the call of the task."""
        uuid = self.signature.uuid
        logger.error("task %s broke off", uuid, exc_info=error, extra={"task_uuid": uuid})
        if not self.is_over:
            self.finish(self.failed(error))

    @property
    def steps(self) -> Checkpoints:
        """Return its steps: see `tasks.context.SlotHolder`."""
        if self._steps is None:
            assert self.context is not None
            keeper = self.keeper or StoreKeeper(self.first)
            app = self.first.app
            self._steps = Checkpoints(self.context, keeper, now=app.now, find=app.registry.find)
        return self._steps

    # Waiting for other tasks: see `tasks.context.SlotHolder`

    @property
    def is_async(self) -> bool:
        task = self.first.task
        return task is not None and task.call.is_async

    def wait_begins(self) -> bool:
        if self.slots is None or not (self.is_async or threading.get_ident() == self.thread_id):
            return False  # a thread of the task's own
        self.slots.wait_begins(self)
        return True

    def wait_ends(self, *, at_once: bool) -> None:
        if self.slots is not None:
            # A coroutine must not keep its loop waiting.
            self.slots.wait_ends(self, at_once=at_once or self.is_async)

    async def wait_ends_async(self, *, at_once: bool) -> None:
        if self.slots is not None:
            await self.slots.wait_ends_async(self, at_once=at_once)


Report = Callable[[Run], None]  # called when the states are worth a mark: started, and progress


def over_limit(limit: float | None) -> str:
    """Return the text of a time limit that is over."""
    return f"ran longer than its time limit of {limit:g} s"


def run_here(run: Run, report: Report | None = None) -> None:
    """Call the function in this thread, in a context of its own, and finish."""
    # ContextVars that a task sets must not be seen by the next task on this thread.
    contextvars.copy_context().run(_run, run, report)


def _run(run: Run, report: Report | None) -> None:
    if (run.is_batch or run.first.is_guarded) and not run.pass_guard():
        return
    if run.settings.transaction:
        return _run_within(run, report)
    _end(run, outcome_of(run, report))


def _run_within(run: Run, report: Report | None) -> None:
    """Call the function in a transaction, and commit its end with it. A batch has none."""
    if (block := begin(run.first)) is None:
        return
    assert run.first.transaction is not None
    try:
        with entered(block):
            outcome = outcome_of(run, report)
        if isinstance(outcome, Succeeded) or roll_back(run.first, outcome):
            _end(run, outcome)
    finally:
        run.first.transaction.own.close()


async def run_async(run: Run, report: Report | None = None) -> None:
    """Await the coroutine function on the running loop; all else is as in `run_here`."""
    if (run.is_batch or run.first.is_guarded) and not await pass_async(
        run.pass_guard, lambda error: run.finish(run.failed(error))
    ):
        return
    _end(run, await outcome_of_async(run, report))


def run_elsewhere(run: Run, report: Report, call: Callable[[Run, Report], Outcome | None]) -> None:
    """Let `call` make the call, and finish. It returns None if it has settled what it is for."""
    if (run.is_batch or run.first.is_guarded) and not run.pass_guard():
        return
    hooks = run.first.hooks
    if hooks.pre_task or hooks.post_task or hooks.error:
        # None of them is called for wrong arguments, so the process finds those too late.
        found = run.arguments()
        if not isinstance(found, tuple):
            _end(run, found)
            return
    token = enter(run.new_context())
    _has_started(run, report)
    outcome: Outcome | None
    try:
        if hooks.pre_task is not None:
            run.note_begun()
            _call_pre_task(run)
        outcome = call(run, report)
    except BaseException as error:  # the hook is user code
        outcome = run.failed(error)
    leave(token)
    if outcome is not None:
        _end(run, outcome)


def outcome_of(run: Run, report: Report | None) -> Outcome:
    """Make the call in this thread, and return what became of it."""
    begun = _begin(run, report)
    if not isinstance(begun, tuple):
        return begun
    call, token = begun
    outcome: Outcome
    try:
        if run.first.hooks.pre_task is not None:
            _call_pre_task(run)
        outcome = run.succeeded(call())
    except BaseException as error:  # user code; SystemExit must not end the worker either
        outcome = run.failed(error)
    leave(token)
    return outcome


async def outcome_of_async(run: Run, report: Report | None) -> Outcome:
    """Make the call on the running loop, and return what became of it."""
    begun = _begin(run, report)
    if not isinstance(begun, tuple):
        return begun
    call, token = begun
    outcome: Outcome
    try:
        if run.first.hooks.pre_task is not None:
            _call_pre_task(run)
        outcome = run.succeeded(await call())
    except BaseException as error:  # user code; cancelled by the worker, it is over already
        outcome = run.failed(error)
    leave(token)
    return outcome


def _begin(run: Run, report: Report | None) -> _Begun | Outcome:
    """Enter the task's context, and return the call; or a failure, for wrong arguments."""
    first = run.first
    task = first.task
    assert task is not None
    found = run.arguments()
    if not isinstance(found, tuple):
        return found
    args, kwargs = found
    told = None if report is None else functools.partial(_progress, run, report)
    context = run.new_context(told)
    if task.call.takes_context:
        args.insert(0, context)
    _has_started(run, report)
    call = functools.partial(task.function, *args, **kwargs)
    if run.signature.headers and is_chunk(run.signature):
        call = functools.partial(each_async if task.call.is_async else each, task.function, *args)
    hooks = first.app.hooks
    if hooks.around:
        wrap = await_around if task.call.is_async else call_around
        call = functools.partial(wrap, hooks.around, run.signature, call)
    if hooks.before or hooks.after:
        between = await_between if task.call.is_async else call_between
        call = functools.partial(between, hooks.before, hooks.after, first.hooks, context, call)
    return call, enter(context)


def _call_pre_task(run: Run) -> None:
    handler = run.first.hooks.pre_task
    assert handler is not None
    for one in run.listed:
        handler(one.signature)


def _has_started(run: Run, report: Report | None) -> None:
    first = run.first
    now = first.started_at or first.app.now()
    for one in run.listed:
        # The phase last: the settler takes what is STARTED for something that has a moment.
        one.started_at = one.started_at or now
        one.phase = STARTED
    if report is not None:
        report(run)
    first.call_started = time.perf_counter()


def misfit(text: str) -> Failed:
    """Return the failure of arguments, or of a result, that are not what they are to be."""
    return Failed(error=text, error_type="ArgumentError", retryable=False)


def _as_go_says(execution: Execution, error: ArgumentError) -> str:
    """Return the text with numbers as they stand in the message: other programs compare it."""
    assert execution.task is not None
    if not str(error).startswith(REFLECT):
        return str(error)  # about a type of our own, which such a number may not fit
    try:
        execution.task.call.values(decode_exact(execution.delivery.body).args)
    except ArgumentError as exact:
        return str(exact)
    except DecodeError:
        pass
    return str(error)


def _progress(run: Run, report: Report, progress: tuple[float, float] | None) -> None:
    for one in run.calls:
        one.progress = progress or one.progress
    report(run)


def _log_caught(signature: Signature[Any], error: Suspended) -> None:
    """Say where the task has caught what was to end its run."""
    where = traceback.extract_tb(error.__traceback__)[:1]
    logger.warning(
        "task %s %s caught Suspended%s, and its run went on to its end; it sleeps all the same "
        "(let it pass: except Exception does not catch it)",
        signature.name,
        signature.uuid,
        "".join(f" in {one.name}, {one.filename} line {one.lineno}" for one in where),
        extra={"task_uuid": signature.uuid},
    )


def _log_raised(signature: Signature[Any], error: BaseException) -> None:
    """Log what the task raised while it was suspended, as in a `finally` block."""
    logger.warning(
        "task %s %s raised this while it was suspended; it sleeps all the same",
        signature.name,
        signature.uuid,
        exc_info=error,
        extra={"task_uuid": signature.uuid},
    )


def _passes_on(execution: Execution) -> bool:
    """Return whether a callback, the next step or a chord's callback gets the result."""
    signature = execution.signature
    return (bool(signature.on_success) and not signature.immutable) or execution.is_collected


def _end(run: Run, outcome: Outcome) -> None:
    """Finish, and call the user's hooks, in the task's thread; what they raise is logged."""
    first = run.first
    runtime = time.perf_counter() - first.call_started
    for one in run.calls:
        one.runtime = runtime
    if run.context is not None:
        run.context.end()  # what reports holds the run: a cycle would need a collection
    hooks = first.hooks
    if not run.finish(outcome):
        return  # it was over before
    if first.transaction is not None and isinstance(outcome, Succeeded):
        if (committed := commit(first, outcome)) is None:
            return
        outcome = committed
    if hooks.error is None and hooks.post_task is None:
        return
    for one in run.calls:
        if one.phase is STARTED:  # its arguments were not wrong
            _call_hooks(one, outcome)


def _call_hooks(execution: Execution, outcome: Outcome) -> None:
    hooks, uuid = execution.hooks, execution.signature.uuid
    error = None if isinstance(outcome, Succeeded) else execution.error
    if error is not None and hooks.error is not None and execution.is_final:
        execution.error_is_handled = True
        try:
            hooks.error(error)
        except BaseException:  # user code
            logger.exception("the error handler failed after task %s", uuid)
    if hooks.post_task is not None:
        try:
            hooks.post_task(execution.signature)
        except BaseException:  # user code; sys.exit() there must not end the thread
            logger.exception("the post-task handler failed after task %s", uuid)
