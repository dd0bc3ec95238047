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
In one store, two messages of a task that two workers begin within the same round trips are both
called.
"""

from __future__ import annotations

import datetime as dt
import queue
import threading
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from machinery_py.backends.base import SETTLED
from machinery_py.brokers.base import WAITING, Fate
from machinery_py.connections.forks import ForkLock
from machinery_py.errors import MachineryError
from machinery_py.stores.base import Session
from machinery_py.tasks.states import State, TaskState
from machinery_py.texts import get_logger
from machinery_py.worker.running.execution import Execution

logger = get_logger(__name__)

PAUSE = 1.0  # seconds to the next try to read a state


class EarlyStarts:
    """Starts of one worker's early tasks: those that wait are committed in the same round trips.

    There is no timer and no thread: one of the callers commits for all that wait, and names the
    next from those that have come meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Execution, queue.SimpleQueue[object]]] = []
        self._is_busy = False

    def begin(self, execution: Execution) -> bool:
        """As `begin_once`."""
        inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        with self._lock:
            self._waiting.append((execution, inbox))
            if not self._is_busy:
                inbox.put(_COMMIT)
            self._is_busy = True
        while (word := inbox.get()) is _COMMIT:
            self._commit()
        if isinstance(word, BaseException):
            raise word
        return bool(word)

    def _commit(self) -> None:
        batch: dict[str, tuple[Execution, queue.SimpleQueue[object]]] = {}
        with self._lock:
            # Two messages of one task begin one after the other.
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                if batch.setdefault(one[0].signature.uuid, one) is not one:
                    self._waiting.append(one)
        try:
            begun = _begin_all([execution for execution, _ in batch.values()])
            for execution, inbox in batch.values():
                inbox.put(execution in begun)
        except BaseException as error:  # each caller has to learn of it
            for _, inbox in batch.values():
                inbox.put(error)
        with self._lock:
            self._is_busy = bool(self._waiting)
            if self._waiting:
                self._waiting[0][1].put(_COMMIT)


_COMMIT = object()
_starts: WeakKeyDictionary[Session, EarlyStarts] = WeakKeyDictionary()
_starts_lock = ForkLock()


def begin_once(execution: Execution) -> bool:
    """Commit that the run begins. False: it must not be called, and is settled.

    Called in the thread that is to make the call, right before it.
    """
    assert execution.session is not None
    with _starts_lock:
        starts = _starts.setdefault(execution.session, EarlyStarts())
    return starts.begin(execution)


def _begin_all(batch: Sequence[Execution]) -> list[Execution]:
    """Commit that these runs begin; return those that may be called, and settle the others."""
    app, session = batch[0].app, batch[0].session
    assert session is not None
    keeps = app.store.backend.features.keeps
    try:
        if keeps:
            states = _states_of(batch)
            batch = [one for one in batch if not _end_if_begun_by_another(one, states)]
        for one in batch:
            one.started_at, one.phase = app.now(), State.STARTED
        marked = [(one, mark) for one in batch if (mark := one.mark()) is not None]
        batch = [one for one, _ in marked]  # without those that have ended while they waited
        if not batch:
            return []
        if keeps:
            session.settle((), [mark for _, mark in marked])
            # Either alone is not enough: RabbitMQ learns of a loss late, MongoDB marks unfenced.
            states = _states_of(batch)
            held = session.consumer.holds([one.delivery for one in batch])
            begun = [
                one
                for one, is_held in zip(batch, held, strict=True)
                if is_held and _is_mine(states, one)
            ]
        else:
            verdicts = session.settle([one.end_of_delivery() for one in batch])
            begun = [
                one for one, verdict in zip(batch, verdicts, strict=True) if verdict == SETTLED
            ]
            for one in begun:
                one.acked = True
    except MachineryError as error:
        for one in batch:
            _put_off(one, error)
        return []
    for one in batch:
        if one not in begun:
            _put_off(one)
    return [one for one in begun if not one.is_over]


def _put_off(execution: Execution, error: MachineryError | None = None) -> None:
    """Give the message back uncalled."""
    if error is not None:
        logger.warning(
            "task %s (ack='early') is not begun, since that cannot be stored: %s",
            execution.signature.uuid,
            error,
        )
    execution.phase = State.RECEIVED
    execution.settle(execution.end_of_delivery(Fate.BACK))


def _end_if_begun_by_another(execution: Execution, states: Mapping[str, TaskState]) -> bool:
    """Settle a second message of a run that has begun; its first one is held, or comes back."""
    state, run = states.get(execution.signature.uuid), execution.signature.run
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
        state = _states_of([execution]).get(execution.signature.uuid)
    except MachineryError as error:
        logger.warning("whether task %s has begun is unknown: %s", execution.signature.uuid, error)
        eta = execution.app.now() + dt.timedelta(seconds=PAUSE)
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


def _states_of(batch: Sequence[Execution]) -> Mapping[str, TaskState]:
    return batch[0].app.store.backend.get_states([one.signature.uuid for one in batch])


def _is_mine(states: Mapping[str, TaskState], execution: Execution) -> bool:
    """Return whether this execution's mark is what is stored: another worker's has another time."""
    state = states.get(execution.signature.uuid)
    return (
        state is not None
        and (state.state, state.run) == (State.STARTED, execution.signature.run)
        and (state.worker, state.started_at) == (execution.worker, execution.started_at)
    )
