"""Tasks that a lost worker may not repeat: `ack="early"` and `on_worker_lost="fail"`.

The message is held until the task has ended, as any other: so the task of a lost worker comes back,
and gets its final state. What keeps it from a second run is its own state.

    ack="early"             STARTED is committed and read back before the call
    on_worker_lost="fail"   STARTED is committed as for any task, soon after the call has begun
    both                    a redelivery of a run that has begun ends in FAILURE (WorkerLost)

    the worker is lost      ack="early"         on_worker_lost="fail"
    before that commit      runs elsewhere      FAILURE, if it left a strike; else runs again
    after it                FAILURE             FAILURE

A second message of the task (published twice with one UUID) finds STARTED, and is not called.

The call follows only if the state is then this run's, and the delivery is still held, in this
order: whoever gets the message later reads STARTED. Else, or if the commit fails, nothing is
called, and the message goes back.

Limits: where no states are kept (the null backend), an early task's message is ended before the
call instead, and nobody is told of a lost run; `on_worker_lost="fail"` sees strikes alone.
In one store, two messages of a task that are begun within the same round trips are both called.
"""

from __future__ import annotations

import datetime as dt

from machinery_py.backends.base import SETTLED
from machinery_py.brokers.base import WAITING, Fate
from machinery_py.errors import MachineryError
from machinery_py.tasks.states import State, TaskState
from machinery_py.texts import get_logger
from machinery_py.worker.execution import Execution

logger = get_logger(__name__)

PAUSE = 1.0  # seconds to the next try to read a state


def begin_once(execution: Execution) -> bool:
    """Commit that the run begins. False: it must not be called, and is settled.

    Called in the thread that is to make the call, right before it.
    """
    app, session = execution.app, execution.session
    assert session is not None
    try:
        if app.store.backend.features.keeps and _end_if_begun_by_another(execution):
            return False
    except MachineryError as error:
        return _put_off(execution, error)
    execution.phase, execution.started_at = State.STARTED, app.clock.now()
    mark = execution.mark()
    if mark is None:
        return False  # it has ended while it waited
    try:
        if app.store.backend.features.keeps:
            session.settle((), [mark])
            # Either alone is not enough: RabbitMQ learns of a loss late, MongoDB marks unfenced.
            is_mine = _is_mine(_state_of(execution), execution)
            has_begun = is_mine and session.consumer.holds([execution.delivery]) == [True]
        else:
            has_begun = execution.acked = session.settle([execution.end_of_delivery()]) == [SETTLED]
    except MachineryError as error:
        return _put_off(execution, error)
    return not execution.is_over if has_begun else _put_off(execution)


def _put_off(execution: Execution, error: MachineryError | None = None) -> bool:
    """Give the message back uncalled, and return False."""
    if error is not None:
        logger.warning(
            "task %s (ack='early') is not begun, since that cannot be stored: %s",
            execution.signature.uuid,
            error,
        )
    execution.phase = State.RECEIVED
    execution.settle(execution.end_of_delivery(Fate.BACK))
    return False


def _end_if_begun_by_another(execution: Execution) -> bool:
    """Settle a second message of a run that has begun; its first one is held, or comes back."""
    state, run = _state_of(execution), execution.signature.run
    if state is None or (state.state, state.run) != (State.STARTED, run):
        return False
    assert execution.session is not None
    if execution.session.consumer.holds([execution.delivery]) != [True]:
        _put_off(execution)  # it has come to that worker
        return True
    if execution.delivery.epoch:  # this delivery has fenced that run: nobody else can end it
        return execution.lose(f"worker {state.worker!r} has begun it by another message of it")
    logger.warning(
        "a second message of task %s is ended: worker %r runs it (ack='early')",
        execution.signature.uuid,
        state.worker,
    )
    return execution.settle(execution.end_of_delivery())


def end_if_begun(execution: Execution) -> bool:
    """Settle a redelivery whose run must not be repeated. False: it has not begun yet."""
    settings, run = execution.settings, execution.signature.run
    if settings.on_worker_lost == "fail" and execution.delivery.strikes:
        return execution.lose("its worker was lost while it ran")
    if not execution.app.store.backend.features.keeps:
        return False
    try:
        state = _state_of(execution)
    except MachineryError as error:
        logger.warning("whether task %s has begun is unknown: %s", execution.signature.uuid, error)
        eta = execution.app.clock.now() + dt.timedelta(seconds=PAUSE)
        return execution.settle(execution.end_of_delivery(Fate.LATER, eta=eta, reason=WAITING))
    if state is None:
        return settings.ack == "early" and execution.lose(
            "its message came back, and its state is gone: it may have begun"
        )
    if state.run < run or state.state in (State.PENDING, State.RECEIVED):
        return False
    if state.run == run and state.state is State.STARTED:
        return execution.lose(f"its worker {state.worker!r} was lost while it ran")
    return execution.settle(execution.end_of_delivery())  # this run has ended; a message is left


def _state_of(execution: Execution) -> TaskState | None:
    uuid = execution.signature.uuid
    return execution.app.store.backend.get_states([uuid]).get(uuid)


def _is_mine(state: TaskState | None, execution: Execution) -> bool:
    """Return whether this execution's mark is what is stored: another worker's has another time."""
    return (
        state is not None
        and (state.state, state.run) == (State.STARTED, execution.signature.run)
        and (state.worker, state.started_at) == (execution.worker, execution.started_at)
    )
