"""Failures: what a task has raised, or its process tells, as an outcome."""

from __future__ import annotations

import msgspec

from machinery_py.errors import (
    ArgumentError,
    Ignore,
    MachineryError,
    NameRefused,
    Reject,
    Replace,
    Retry,
    RetryTaskLater,
    StepFailed,
    StepRefused,
    Suspended,
    TaskFailed,
    Unsupported,
    WorkerLost,
)
from machinery_py.names import check_queue
from machinery_py.registry.outcomes import (
    IGNORED,
    POSTPONED,
    REJECTED,
    REVOKED,
    Batched,
    Failed,
    Lost,
    Outcome,
    Postponed,
    Rejected,
    Replaced,
    Retried,
    Sleeping,
    Succeeded,
    replaced_by,
)
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import failure_by, text_of


def failed(execution: Execution, error: BaseException) -> Outcome:
    """Return the outcome of what the function raised."""
    if execution.revoked and (
        isinstance(error, (Retry, RetryTaskLater, Reject, Replace, Suspended))
        or type(error).__name__ == "CancelledError"
    ):
        return REVOKED
    if isinstance(error, RetryTaskLater):
        execution.error = error
        return Postponed(error=text_of(error), delay=error.delay, limit=error.limit)
    if isinstance(error, Suspended):
        return Sleeping(error=text_of(error), until=error.until, waits=error.waits)
    if isinstance(error, Retry):
        return _retried(execution, error)
    if isinstance(error, Replace):
        return replaced_by(error.workflow)
    if isinstance(error, Ignore):
        return Failed(error=text_of(error), error_type=IGNORED, retryable=False)
    if isinstance(error, Reject):
        return _rejected(execution, error)
    if isinstance(error, KeyboardInterrupt):
        execution.interrupt = error
    execution.error = (
        error
        if isinstance(error, Exception)
        else MachineryError(f"{type(error).__name__}: {text_of(error)}")
    )
    return failure_by(error, retryable=not execution.revoked and _may_retry(execution, error))


def _may_retry(execution: Execution, error: BaseException) -> bool:
    is_final = isinstance(error, (TaskFailed, Unsupported)) and error.permanent
    if is_final or isinstance(error, StepRefused):
        return False
    cause = error.__cause__ if isinstance(error, StepFailed) else None
    return execution.settings.may_retry(cause or error)


def _rejected(execution: Execution, wanted: Reject) -> Outcome:
    execution.error = wanted
    end = failure_by(wanted, retryable=False)
    if wanted.requeue:
        return Rejected(error=end.error)
    return msgspec.structs.replace(end, error_type=REJECTED)


def _retried(execution: Execution, wanted: Retry) -> Outcome:
    """Return the outcome of `Retry`: of a failure, if it cannot be sent like this."""
    assert execution.task is not None
    cause = wanted.__cause__ or wanted
    execution.error = cause if isinstance(cause, Exception) else wanted
    args = None
    try:
        if wanted.queue:
            check_queue(wanted.queue)
        if wanted.args_of_task is not None or wanted.kwargs_of_task is not None:
            args = execution.task.call.arguments(
                wanted.args_of_task or (), wanted.kwargs_of_task or {}
            )
    except (ArgumentError, NameRefused) as error:
        execution.error = error
        return failure_by(error, "the retry that it asked for: ", retryable=False)
    return Retried(
        failed=failure_by(cause),
        delay=wanted.delay,
        eta=wanted.eta,
        queue=wanted.queue,
        args=args,
        retries=wanted.retries,
    )


def judged(execution: Execution, outcome: Outcome) -> Outcome:
    """Return the outcome of a call in another process, with what is known only here."""
    error_type = POSTPONED if isinstance(outcome, Postponed) else ""
    if isinstance(outcome, Rejected):
        error_type = REJECTED
    end = outcome.failed if isinstance(outcome, Retried) else outcome
    if isinstance(end, Failed):
        error_type = end.error_type
    if execution.revoked and (
        isinstance(outcome, (Postponed, Retried, Sleeping, Rejected, Replaced))
        or error_type.endswith("CancelledError")
    ):
        return REVOKED
    if isinstance(outcome, Lost):
        execution.error = WorkerLost(outcome.error)
        if execution.runs_once:
            return execution.cut_off(outcome.error)
    elif not isinstance(end, (Succeeded, Batched, Replaced, Sleeping)) and error_type != IGNORED:
        uuid, name = execution.signature.uuid, execution.signature.name
        execution.error = TaskFailed(uuid, name, end.error, error_type=error_type)
    if execution.revoked and isinstance(outcome, Failed):
        return msgspec.structs.replace(outcome, retryable=False)
    return outcome
