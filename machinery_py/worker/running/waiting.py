"""Waits of a worker's tasks for signals: what a run gets, and what becomes of one that waits."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from machinery_py.backends.base import Rider
from machinery_py.bounds import CHECKPOINT_LIFE
from machinery_py.errors import MachineryError
from machinery_py.registry.outcomes import Sleeping
from machinery_py.rows.contract import Patience
from machinery_py.signals import check_signals
from machinery_py.tasks.checkpoints import generation_of
from machinery_py.tasks.linking import link
from machinery_py.tasks.mailboxes import (
    UNREAD,
    Received,
    Wanted,
    decode,
    encode,
    of_next_generation,
    read_among,
    record_of,
    signal_in,
)
from machinery_py.tasks.states import FAILURE, TaskState
from machinery_py.texts import get_logger
from machinery_py.wire.states import encode_results
from machinery_py.wire.steps import unpack_step
from machinery_py.worker.running.execution import Execution, Suspension, settlement_of

logger = get_logger(__name__)

EXPIRED = "machinery_py.errors.ResultExpired"  # error type


def receive(execution: Execution, wanted: Wanted) -> Received:
    """Return the signal; or, if it has not come, whether the run is to end.

    Then its settlement suspends the task, unless the mailbox has changed by then.

    Raises:
        Unsupported: the backend keeps no signals.
    """
    app, uuid = execution.app, execution.signature.uuid
    backend = app.store.backend
    check_signals(backend, execution.signature.name)
    [body] = app.patiently(lambda: backend.claims([record_of(uuid)]))
    execution.has_mailbox = True
    box = decode(body, wanted.read)
    signal = signal_in(box, wanted)
    if signal is not None and (signal.failed or signal.results != UNREAD):
        return signal
    state: TaskState | None = None
    if wanted.child:
        # An earlier run has sent it, if it is known: one that was revoked meanwhile, say.
        state = app.patiently(lambda: backend.get_states([wanted.child])).get(wanted.child)
        if state is not None and state.state is FAILURE:
            return Received(b"[]", failed=(state.error, state.error_type))
        if signal is not None and not (state is not None and state.results):
            return Received(b"[]", failed=("its result was not kept", EXPIRED))
        if state is not None and state.is_finished:
            return Received(encode_results(state.results))
    if wanted.waits:
        if state is None:
            _check_child(execution, wanted)
        execution.suspension = Suspension(wanted, body, box, is_sent=state is not None)
    return Received(waits=wanted.waits)


def _check_child(execution: Execution, wanted: Wanted) -> None:
    """Raise what the sending of a task would, that this one waits for."""
    if wanted.workflow:
        app = execution.app
        plan = link(unpack_step(wanted.workflow), now=app.now())
        app.registry.check(plan.first)
        app.check_asked(plan.first)


def begin_generation(execution: Execution, old: Mapping[str, bytes]) -> None:
    """Let the mailbox be that of this generation, before its first step drops the rows of the last.

    What was not read is there for the next `wait_for`.
    """
    generation, uuid = generation_of(execution.signature), execution.signature.uuid
    app, name, read = execution.app, record_of(uuid), read_among(old)
    backend, patience = app.store.backend, Patience()
    while backend.features.claims:
        [body] = app.patiently(lambda: backend.claims([name]))
        box = decode(body)
        if body is None or box.generation >= generation:
            return
        new = encode(of_next_generation(box, read, generation))
        rider = Rider(name=name, expected=body, body=new, life=CHECKPOINT_LIFE)
        if app.patiently(functools.partial(backend.amend, rider)):
            return
        patience.wait()


def run_again(execution: Execution) -> None:
    """Let a task that was to wait run again at once: its mailbox has changed meanwhile."""
    execution.suspension = None
    at_once = Sleeping(error="a signal came before it waited", until=execution.app.now())
    execution.amend(*settlement_of(execution, at_once))


def end_mailbox(execution: Execution, life: float) -> None:
    """Let the mailbox of a task that has ended be forgotten so many seconds from now; 0: at once.

    A failure does no harm: it stays longer.
    """
    if not execution.has_mailbox:
        return
    backend, name = execution.app.store.backend, record_of(execution.signature.uuid)
    try:
        [body] = backend.claims([name])
        if body is not None and life:
            backend.amend(Rider(name=name, expected=body, body=body, life=life))
        elif body is not None:
            backend.release([(name, body)])
    except MachineryError as error:
        logger.debug("signals of task %s stay for now: %s", execution.signature.uuid, error)
