"""Telling what became of a task: events, the log, and those who wait for its end."""

from __future__ import annotations

from collections.abc import Sequence

from machinery_py.app import Engine
from machinery_py.backends.base import FENCED, Verdict
from machinery_py.brokers.base import Fate
from machinery_py.events import MessageDead, TaskFailed, TaskFenced, TaskRetried, TaskSucceeded
from machinery_py.revocation import let_go
from machinery_py.tasks.states import State
from machinery_py.texts import get_logger
from machinery_py.unique import tidy
from machinery_py.worker.execution import Execution

logger = get_logger(__name__)


def log_fenced(execution: Execution, verdict: Verdict) -> None:
    """Say that a run came to nothing, if that is so."""
    if verdict is FENCED:
        logger.warning(
            "a run of task %s came to nothing: its lease was lost, or it was finished before",
            execution.signature.uuid,
            extra={"task_uuid": execution.signature.uuid},
        )


def let_next(engine: Engine, executions: Sequence[Execution], verdicts: Sequence[Verdict]) -> None:
    """Give back what they held that others wait for: locks, and the keys of what is over."""
    over, revoked = [], []
    for execution, verdict in zip(executions, verdicts, strict=True):
        if execution.guard is not None:
            execution.guard.leave()
        if (
            execution.signature.headers
            and execution.settlement is not None
            and verdict is not FENCED
        ):
            over.append((execution.signature, execution.settlement))
        if (
            execution.revoked
            and execution.settlement is not None
            and execution.settlement.fate is Fate.DONE
        ):
            revoked.append(execution.signature.uuid)
    if over:
        tidy(engine, over)
    if revoked:
        let_go(engine, revoked)


def tell(engine: Engine, execution: Execution, verdict: Verdict) -> None:
    """Emit the event that goes with a settled execution."""
    settlement, signature = execution.settlement, execution.signature
    if settlement is None:
        return
    if verdict is FENCED:
        if engine.events.wants(TaskFenced):
            engine.events.emit(TaskFenced(signature=signature, worker=execution.worker))
        return
    engine.tell_sent(execution.sends)
    if settlement.fate is Fate.DEAD and engine.events.wants(MessageDead):
        engine.events.emit(
            MessageDead(
                uuid=settlement.uuid,
                name=settlement.name,
                queue=settlement.delivery.queue,
                reason=settlement.reason,
                error=settlement.error,
            )
        )
    if not settlement.states:
        return
    state = settlement.states[0]
    if state.state is State.SUCCESS and engine.events.wants(TaskSucceeded):
        engine.events.emit(
            TaskSucceeded(signature=signature, worker=execution.worker, runtime=execution.runtime)
        )
    elif state.state is State.FAILURE and engine.events.wants(TaskFailed):
        engine.events.emit(
            TaskFailed(
                signature=signature,
                worker=execution.worker,
                error=state.error,
                error_type=state.error_type,
            )
        )
    elif state.state is State.RETRY and engine.events.wants(TaskRetried):
        delay = (state.eta - state.created_at).total_seconds() if state.eta else 0.0
        engine.events.emit(
            TaskRetried(
                signature=signature,
                worker=execution.worker,
                error=state.error,
                delay=max(0.0, delay),
            )
        )
