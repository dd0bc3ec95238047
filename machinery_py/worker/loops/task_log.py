"""Lines of the log for each task: started, succeeded, failed and again, failed for good.

They are made in the thread that commits: of a run that has started before its commit, of an end
after it. One batch is one list of lines. A handler with `write_lines` (the command line's) gets the
list, and writes it at once; any other handler gets a record for each, as from any logger.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.backends.base import FENCED, Verdict
from machinery_py.brokers.base import Fate
from machinery_py.errors import RetryTaskLater
from machinery_py.registry.outcomes import (
    IGNORED,
    NOT_ITS_FAILURE,
    REJECTED,
    REVOKED,
    WORKER_LOST,
)
from machinery_py.tasks.signature import UNLIMITED
from machinery_py.tasks.states import SUSPENDED, State, TaskState
from machinery_py.texts import MAX_LINE, cut, get_logger, length
from machinery_py.worker.running.execution import Execution

NAME = "machinery_py.tasks"
INFO = logging.INFO
logger = get_logger(NAME)
_OWN_FILTERS = len(logger.filters)


class TaskLine(msgspec.Struct, frozen=True, gc=False):
    """One line. `at`: unix seconds; `error`: as it was raised, if that was in this process."""

    level: int
    at: float
    text: str
    execution: Execution
    runtime: float | None = None
    error: BaseException | None = None
    traceback: str = ""

    def fields(self) -> dict[str, Any]:
        """Return what a record has as `extra`."""
        execution = self.execution
        signature = execution.signature
        return {
            "task_uuid": signature.uuid,
            "task_name": signature.name,
            "attempt": signature.attempt,
            "queue": execution.delivery.queue,
            "worker": execution.worker,
            "runtime": self.runtime,
        }

    def record(self) -> logging.LogRecord:
        error = self.error
        info = None if error is None else (type(error), error, error.__traceback__)
        make = logging.getLogRecordFactory()
        record = make(NAME, self.level, __file__, 0, self.text, None, info)
        record.created, record.msecs = self.at, self.at % 1 * 1000
        if self.traceback:  # as it is stored, where every text can be written in UTF-8
            record.exc_text = self.traceback.rstrip("\n")
        record.__dict__.update(self.fields())
        return record


def is_on(app: Application) -> bool:
    """Return whether tasks that start and succeed have lines; final failures always have one."""
    return app.config.log_tasks and logger.isEnabledFor(INFO)


def starts(executions: Sequence[Execution]) -> Iterator[TaskLine]:
    """Yield the lines of those that have started, run on, and were not yielded before."""
    for execution in executions:
        has_started = execution.phase is State.STARTED and not execution.is_over
        if has_started and not execution.start_is_logged:
            execution.start_is_logged = True
            yield _started(execution)


def ends(
    app: Application, executions: Sequence[Execution], verdicts: Sequence[Verdict]
) -> Iterator[TaskLine]:
    """Yield the lines of committed ends, each after that of its start if it has none yet."""
    told = is_on(app)
    for execution, verdict in zip(executions, verdicts, strict=True):
        settlement = execution.settlement
        if settlement is None or not settlement.states or verdict is FENCED:
            continue
        state = settlement.states[0]
        if told and state.started_at is not None and not execution.start_is_logged:
            execution.start_is_logged = True
            yield _started(execution)
        if state.state is State.FAILURE:
            if not execution.error_is_handled:
                yield _failed(execution, state)
        elif not app.config.log_tasks and state.error_type != WORKER_LOST:
            continue
        elif state.state is State.RETRY:
            yield _retried(execution, state)
        elif told:
            yield _succeeded(execution, state)


def _started(execution: Execution) -> TaskLine:
    signature, at = execution.signature, execution.started_at
    assert at is not None
    wait = execution.waited(at)
    waited = "" if wait is None else f", waited {length(wait)}"
    attempt = signature.attempt if signature.headers else 1
    text = f"task {signature.name} {signature.uuid} started (attempt {attempt}{waited})"
    return TaskLine(INFO, at.timestamp(), text, execution)


def _succeeded(execution: Execution, state: TaskState) -> TaskLine:
    signature, runtime = execution.signature, execution.runtime
    text = f"task {signature.name} {signature.uuid} succeeded in {length(runtime)}"
    return TaskLine(INFO, state.created_at.timestamp(), text, execution, runtime)


def _retried(execution: Execution, state: TaskState) -> TaskLine:
    signature, left = execution.signature, execution.signature.retry_count
    pause = (state.eta - state.created_at).total_seconds() if state.eta else 0.0
    if state.error_type == SUSPENDED:
        text = f"task {signature.name} {signature.uuid} {state.error}"
        return TaskLine(INFO, state.created_at.timestamp(), text, execution, execution.runtime)
    if isinstance(execution.error, RetryTaskLater) or not state.error_type:
        what = "postponed"
    elif state.error_type == WORKER_LOST:  # counts as no try
        what = "was cut off"
    elif state.error_type == REJECTED:  # nor does this
        what = "went back to its queue"
    else:
        total = "" if left == UNLIMITED else f" of {signature.attempt + left}"
        what = f"failed (try {signature.attempt}{total})"
    text = f"task {signature.name} {signature.uuid} {what}, again in {length(pause)}"
    text = cut(f"{text}: {_error_text(state)}", MAX_LINE)
    at = state.created_at.timestamp()
    return TaskLine(logging.WARNING, at, text, execution, execution.runtime)


def _failed(execution: Execution, state: TaskState) -> TaskLine:
    signature = execution.signature
    tries = signature.attempt - (state.started_at is None)
    after = f" after {tries:,} {'try' if tries == 1 else 'tries'}" if tries else ""
    ended = "ended" if state.error_type == IGNORED else "failed for good"
    text = f"task {signature.name} {signature.uuid} {ended}{after}: {_error_text(state)}"
    if execution.settlement is not None and execution.settlement.fate is Fate.DEAD:
        text += "; its message is a dead letter"
    level = logging.ERROR
    if state.error_type in NOT_ITS_FAILURE:
        is_wanted = state.error_type in (REVOKED.error_type, IGNORED)
        level = INFO if is_wanted else logging.WARNING
    error = execution.error
    return TaskLine(
        level,
        state.created_at.timestamp(),
        cut(text, MAX_LINE),
        execution,
        execution.runtime or None,
        error if error is not None and error.__traceback__ is not None else None,
        state.traceback,
    )


def _error_text(state: TaskState) -> str:
    kind = state.error_type.rpartition(".")[2]
    return f"{kind}: {state.error}" if kind else state.error


def write(made: Iterable[TaskLine]) -> None:
    """Hand the lines to the handlers of the logger, and of those above it. Raises nothing."""
    try:
        levels = [one for one in (INFO, logging.WARNING, logging.ERROR) if logger.isEnabledFor(one)]
        _write([one for one in made if one.level in levels])
    except Exception:  # ours, or of a record factory: the thread that commits must live on
        get_logger(__name__).exception("lines of tasks could not be logged")


def _write(lines: Sequence[TaskLine]) -> None:
    found = False
    one: logging.Logger | None = logger
    while one is not None:
        for handler in one.handlers:
            found = True
            if not isinstance(handler, logging.NullHandler):  # the package has one
                _hand(handler, lines)
        one = one.parent if one.propagate else None
    if not found and logging.lastResort is not None:  # as for any logger
        _hand(logging.lastResort, lines)


def _hand(handler: logging.Handler, lines: Sequence[TaskLine]) -> None:
    if handler.level > INFO:
        lines = [line for line in lines if line.level >= handler.level]
    if not lines:
        return
    write_lines = getattr(handler, "write_lines", None)
    if write_lines is not None and len(logger.filters) == _OWN_FILTERS and not handler.filters:
        write_lines(lines)
        return
    for line in lines:
        record = line.record()
        try:
            if logger.filter(record):
                handler.handle(record)
        except Exception:  # a filter of user code: the thread that commits must live on
            handler.handleError(record)
