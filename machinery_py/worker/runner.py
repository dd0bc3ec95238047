"""Running an execution: pass its guard, make the call, finish it.

    run             the call is made in this thread
    run_async       the same, for a coroutine function on the running loop
    run_elsewhere   the call is made by a task process (worker/processes.py)

`outcome_of` and `outcome_of_async` are the call: arguments, hooks, function, result. Whatever user
code raises becomes an outcome there. A task process makes the call with the same two functions.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Callable
from contextvars import Token
from typing import Any

from machinery_py.errors import ArgumentError, BatchFailed, DecodeError
from machinery_py.registry.calls import REFLECT
from machinery_py.registry.chunks import each, each_async, is_chunk, result_of_chunk, rows_of
from machinery_py.registry.outcomes import Failed, Outcome, Succeeded
from machinery_py.stores.base import Settlement
from machinery_py.tasks.context import Context, enter, leave
from machinery_py.tasks.states import State
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_exact
from machinery_py.wire.states import encode_results
from machinery_py.worker.admission import ExecutionGuard, pass_async
from machinery_py.worker.batches import BatchRun
from machinery_py.worker.execution import Execution
from machinery_py.worker.hooks import await_around, await_between, call_around, call_between
from machinery_py.worker.once import begin_once

logger = get_logger(__name__)

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/executors.py

Report = Callable[[Execution], None]  # called when the state is worth a mark: started, and progress

# What `_begin` returns: the call, ready to be made, and how the task's context is left.
_Begun = tuple[Callable[[], Any], Token[Context | None]]


def run(execution: Execution, report: Report | None = None) -> None:
    """Call the function in this thread, in a context of its own, and finish."""
    # ContextVars that a task sets must not be seen by the next task on this thread.
    contextvars.copy_context().run(_run, execution, report)


def _run(execution: Execution, report: Report | None) -> None:
    if execution.is_guarded and not _pass_guard(execution):
        return
    _end(execution, outcome_of(execution, report))


async def run_async(execution: Execution, report: Report | None = None) -> None:
    """Await the coroutine function on the running loop; all else is as in `run`."""
    if execution.is_guarded and not await pass_async(
        lambda: _pass_guard(execution), lambda error: execution.finish(execution.failed(error))
    ):
        return
    _end(execution, await outcome_of_async(execution, report))


def run_elsewhere(
    execution: Execution, report: Report, call: Callable[[Execution, Report], Outcome | None]
) -> None:
    """Let `call` make the call, and finish. It returns None if it has settled the execution."""
    if execution.is_guarded and not _pass_guard(execution):
        return
    hooks = execution.hooks
    if hooks.pre_task or hooks.post_task or hooks.error:
        # None of them is called for wrong arguments, so the process finds those too late.
        found = _rows(execution) if isinstance(execution, BatchRun) else _arguments(execution)
        if not isinstance(found, tuple):
            _end(execution, found)
            return
    execution.context = execution.new_context()
    token = enter(execution.context)
    _has_started(execution, report)
    outcome: Outcome | None
    try:
        if hooks.pre_task is not None:
            _call_pre_task(execution)
        outcome = call(execution, report)
    except BaseException as error:  # the hook is user code
        outcome = execution.failed(error)
    leave(token)
    if outcome is not None:
        _end(execution, outcome)


def outcome_of(execution: Execution, report: Report | None) -> Outcome:
    """Make the call in this thread, and return what became of it."""
    begun = _begin(execution, report)
    if not isinstance(begun, tuple):
        return begun
    call, token = begun
    outcome: Outcome
    try:
        if execution.hooks.pre_task is not None:
            _call_pre_task(execution)
        outcome = _succeeded(execution, call())
    except BaseException as error:  # user code; SystemExit must not end the worker either
        outcome = _raised(execution, error)
    leave(token)
    return outcome


async def outcome_of_async(execution: Execution, report: Report | None) -> Outcome:
    """Make the call on the running loop, and return what became of it."""
    begun = _begin(execution, report)
    if not isinstance(begun, tuple):
        return begun
    call, token = begun
    outcome: Outcome
    try:
        if execution.hooks.pre_task is not None:
            _call_pre_task(execution)
        outcome = _succeeded(execution, await call())
    except BaseException as error:  # user code; cancelled by the worker, it is over already
        outcome = _raised(execution, error)
    leave(token)
    return outcome


def set_guard(execution: Execution) -> ExecutionGuard:
    """Give it a guard: before it is submitted, if those of its key are to run in order."""
    assert execution.task is not None
    guard = ExecutionGuard(
        execution.app,
        execution.task,
        execution.settings,
        execution.signature,
        execution.delivery,
    )
    execution.guard = guard
    return guard


def _pass_guard(execution: Execution) -> bool:
    """Let it in by its limits, lock and key, and commit an early start. False: it is settled.

    Of a batch, each call does that; the others are run.
    """
    if isinstance(execution, BatchRun):
        for one in execution.calls:
            if one.is_guarded:
                _pass_own_guard(one, execution)
        execution.placed = [one for one in execution.calls if not one.is_over]
        execution.acked = any(one.acked for one in execution.placed)
        return bool(execution.placed)
    return _pass_own_guard(execution, execution)


def _pass_own_guard(execution: Execution, run: Execution) -> bool:
    guard = execution.guard or set_guard(execution)
    stop = guard.enter(run.cancel)
    execution.signature = guard.signature
    is_early = execution.settings.ack == "early"
    if stop is None and not execution.is_over and (not is_early or begin_once(execution)):
        return True
    guard.leave()
    if isinstance(stop, Settlement):
        execution.settle(stop)
    elif stop is not None:
        execution.finish(stop)
    return False


def _begin(execution: Execution, report: Report | None) -> _Begun | Outcome:
    """Enter the task's context, and return the call; or a failure, for wrong arguments."""
    task = execution.task
    assert task is not None
    found = _rows(execution) if isinstance(execution, BatchRun) else _arguments(execution)
    if not isinstance(found, tuple):
        return found
    args, kwargs = found
    told = None if report is None else functools.partial(_progress, execution, report)
    execution.context = context = execution.new_context(told)
    if isinstance(execution, BatchRun):
        context.calls = [one.signature for one in execution.listed]
    if task.call.takes_context:
        args.insert(0, context)
    _has_started(execution, report)
    call = functools.partial(task.function, *args, **kwargs)
    if execution.signature.headers and is_chunk(execution.signature):
        call = functools.partial(each_async if task.call.is_async else each, task.function, *args)
    hooks = execution.app.hooks
    if hooks.around:
        wrap = await_around if task.call.is_async else call_around
        call = functools.partial(wrap, hooks.around, execution.signature, call)
    if hooks.before or hooks.after:
        between = await_between if task.call.is_async else call_between
        call = functools.partial(between, hooks.before, hooks.after, execution.hooks, context, call)
    return call, enter(context)


def _arguments(execution: Execution) -> tuple[list[Any], dict[str, Any]] | Failed:
    """Return the arguments of the call, or a failure if they are wrong."""
    assert execution.task is not None
    call, signature = execution.task.call, execution.signature
    try:
        if signature.headers and is_chunk(signature):
            return [rows_of(call, signature)], {}
        return call.values(signature.args)
    except ArgumentError as error:
        # As Go: wrong arguments will not get better, so there is no retry.
        return _misfit(_as_go_says(execution, error))


def _rows(run: BatchRun) -> tuple[list[Any], dict[str, Any]] | Outcome:
    """Return what the function is called with, without the calls that are refused."""
    rows: list[Any] = []
    for one in run.placed:
        found = _arguments(one)
        if isinstance(found, Failed):
            run.refused[one] = found
        else:
            rows += found[0]
    return ([rows], {}) if rows else run.outcome(lambda _, one: run.refused[one])


def _call_pre_task(run: Execution) -> None:
    assert run.hooks.pre_task is not None
    for one in run.listed if isinstance(run, BatchRun) else (run,):
        run.hooks.pre_task(one.signature)


def _has_started(execution: Execution, report: Report | None) -> None:
    # The phase last: the settler takes a run that is STARTED for one that has a moment.
    execution.started_at = execution.started_at or execution.app.now()
    execution.phase = State.STARTED
    if isinstance(execution, BatchRun):
        for one in execution.listed:
            one.started_at, one.phase = one.started_at or execution.started_at, State.STARTED
    if report is not None:
        report(execution)
    execution.call_started = time.perf_counter()


def _misfit(text: str) -> Failed:
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


def _progress(execution: Execution, report: Report, progress: tuple[float, float] | None) -> None:
    execution.progress = progress or execution.progress
    report(execution)


def _raised(execution: Execution, error: BaseException) -> Outcome:
    """Return the outcome of what the function raised."""
    if not (isinstance(execution, BatchRun) and isinstance(error, BatchFailed)):
        return execution.failed(error)
    count, errors = len(execution.listed), error.errors
    results = [None] * count if error.results is None else list(error.results)
    if len(results) != count or not all(place in range(count) for place in errors):
        return execution.failed(
            ValueError(f"{error}, with {len(results)} results (it has {count} calls)")
        )
    return execution.outcome(
        lambda place, one: (
            one.failed(errors[place]) if place in errors else _succeeded(one, results[place])
        )
    )


def _succeeded(execution: Execution, value: Any) -> Outcome:
    """Return the outcome of what the function returned."""
    if isinstance(execution, BatchRun):
        count = len(execution.listed)
        if value is not None and not (isinstance(value, (list, tuple)) and len(value) == count):
            found = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
            text = f"a batch of {count} calls returned a {type(value).__name__}{found}"
            return execution.outcome(
                lambda _, one: _misfit(f"{text} (a list of {count} results, or None)")
            )
        return execution.outcome(
            lambda place, one: _succeeded(one, None if value is None else value[place])
        )
    task = execution.task
    assert task is not None
    if value is None or (execution.settings.ignore_result and not _passes_on(execution)):
        return Succeeded(())
    try:
        if execution.signature.headers and is_chunk(execution.signature):
            results = result_of_chunk(task.call, value)
        else:
            results = task.call.results(value)
    except ArgumentError as error:
        return _misfit(str(error))
    if type(value) is not int:
        limit = execution.app.config.max_result_size
        size = len(encode_results(results))
        if size > limit:
            return _misfit(
                f"the result has {size:,} bytes, more than max_result_size = {limit:,} "
                "(store it elsewhere and return where)"
            )
    return Succeeded(results)


def _passes_on(execution: Execution) -> bool:
    """Return whether a callback, the next step or a chord's callback gets the result."""
    signature = execution.signature
    return (bool(signature.on_success) and not signature.immutable) or execution.is_collected


def _end(execution: Execution, outcome: Outcome) -> None:
    """Finish, and call the user's hooks, in the task's thread; what they raise is logged."""
    execution.runtime = time.perf_counter() - execution.call_started
    if execution.context is not None:
        execution.context.end()  # what reports holds the execution: a cycle would need a collection
    for one in execution.calls:
        one.runtime = execution.runtime
    hooks = execution.hooks
    if not execution.finish(outcome) or (hooks.error is None and hooks.post_task is None):
        return  # it was over before, or there are none
    for one in execution.calls or (execution,):
        if one.phase is State.STARTED:  # its arguments were not wrong
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
