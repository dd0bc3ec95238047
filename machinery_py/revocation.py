"""Ends of tasks that no worker holds: a revoked task, the callback of a broken chord.

Revoking is three steps, each of which may be the last one before a crash:

    1  backend: the tasks are revoked, for as long as their messages may be on their way
    2  store:   a waiting task becomes FAILURE, with its follow-up, unless it has begun meanwhile
    3  worker:  drops its message when it comes; if the task is not over, it does step 2 first

    crash after   what there is                        who goes on
    1             revoked, PENDING until it is due     the worker that gets the message
    2             FAILURE; the message is on its way   the same: it only drops it

A final state may expire before the message comes. So step 1 revokes a second name as well, which
says that step 2 was to be done: a task that has this name and no state is over. Of the worker that
begins a task and the process that revokes it, one writes the final state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from machinery_py.app import Application
from machinery_py.backends.base import REVOKED_LIFE, SETTLED
from machinery_py.bounds import PURGE_STEP, in_steps
from machinery_py.brokers.base import Message
from machinery_py.errors import DecodeError, MachineryError
from machinery_py.events import TaskFailed, TaskRevoked
from machinery_py.names import check_encodable
from machinery_py.registry.outcomes import REVOKED, Failed, broken, failing_of
from machinery_py.signals import forget_signals, suspended_by
from machinery_py.stores.base import Firing, change_of, in_place_of
from machinery_py.tasks.context import on_behalf_of
from machinery_py.tasks.mailboxes import SILENT
from machinery_py.tasks.plans import PREFIX
from machinery_py.tasks.signature import Signature
from machinery_py.tasks.states import SUSPENDED, State, TaskState
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature

logger = get_logger(__name__)

# Seconds after its ETA; a worker that gets the message makes it REVOKED_LIFE from then.
WAITING_LIFE = 366 * 86400.0
PURGED = Failed(
    error="revoked: its message was deleted from its queue", error_type="Revoked", retryable=False
)
WAITED = frozenset((State.PENDING, State.RETRY))
BEGUN = frozenset((State.RECEIVED, State.STARTED))


def revoke(app: Application, uuids: Sequence[str]) -> bool:
    """Revoke tasks: steps 1 and 2. Returns whether chords may be over now.

    Raises:
        ArgumentError: nothing was done; one of them holds half a surrogate pair.
        Unsupported: nothing was done; the result backend keeps no revocations.
        BackendUnavailable, PublishRefused, PublishUnknown: some of it may be done; repeat it.
    """
    check_encodable("revoke", uuids)
    backend, now = app.store.backend, app.now()
    states = backend.get_states(uuids) if backend.features.keeps else {}
    waiting = [state for state in states.values() if _waits(state)]
    over = [uuid for uuid, state in states.items() if state.is_finished]
    if over:
        backend.revoke(over)
    if len(over) < len(uuids):
        names = [
            *(uuid for uuid in uuids if uuid not in states or not states[uuid].is_finished),
            *(_ended(state.task_uuid) for state in waiting),
        ]
        ahead = max(
            ((state.eta - now).total_seconds() for state in waiting if state.eta is not None),
            default=0.0,
        )
        backend.revoke(names, max(0.0, ahead) + WAITING_LIFE)
    arrived = [_end_waiting(app, state) for state in waiting]
    running = [uuid for uuid, state in states.items() if state.state in BEGUN]
    if running:  # one may have begun to wait for a signal before it was revoked
        again = backend.get_states(running).values()
        arrived += [_end_waiting(app, one) for one in again if one.error_type == SUSPENDED]
    return any(arrived)


def end_if_revoked(app: Application, signature: Signature[Any]) -> None:
    """End a task that has begun to wait for a signal, if it was revoked before.

    Raises:
        BackendUnavailable, PublishRefused, PublishUnknown: repeat it.
    """
    if revoked_among(app, [signature]):
        states = app.store.backend.get_states([signature.uuid]).values()
        for state in states:
            if state.error_type == SUSPENDED:
                _end_waiting(app, state)


def _waits(state: TaskState) -> bool:
    # Go, and others who write the state alone, do not say what follows from it.
    return state.state in (State.PENDING, State.RETRY) and state.message != b""


def _ended(uuid: str) -> str:
    return f"ended {uuid}"


def _both(uuids: Iterable[str]) -> list[str]:
    return [name for uuid in uuids for name in (uuid, _ended(uuid))]


def _end_waiting(app: Application, state: TaskState) -> bool:
    """Fail a task that has not begun. True: groups have an arrival."""
    try:
        signature = failing_of(state.message, state.task_name, state.task_uuid)
    except DecodeError as error:
        logger.error(
            "what follows task %s cannot be decoded, its message will tell: %s",
            state.task_uuid,
            error,
        )
        return False
    firing, sent = end_unheld(app, signature, REVOKED, state)
    if not fire(app, firing):
        return False  # it has begun, or ended
    if state.error_type == SUSPENDED:
        forget_signals(app, state.task_uuid)
    app.report_sent(sent)
    _report(app, signature, REVOKED)
    return bool(firing.arrivals)


def _report(app: Application, signature: Signature[Any], outcome: Failed) -> None:
    if TaskRevoked in app.events.wanted:
        app.events.emit(TaskRevoked(signature=signature, worker=""))
    if TaskFailed in app.events.wanted:
        app.events.emit(
            TaskFailed(
                signature=signature, worker="", error=outcome.error, error_type=outcome.error_type
            )
        )


def end_unheld(
    app: Application,
    signature: Signature[Any],
    outcome: Failed,
    state: TaskState,
    *,
    group_uuid: str = "",
) -> tuple[Firing, Sequence[Signature[Any]]]:
    """Return the firing that fails a task that no worker holds, and the signatures it sends.

    Args:
        state: how it stands.
        group_uuid: of the group whose callback it is; that group is settled with it.
    """
    now = app.now()
    then, out = app.failed_unheld(signature, outcome, queue=state.queue)
    with on_behalf_of(signature, queue=state.queue):
        arrivals = app.arrivals(then.arrived)
    failure = TaskState(
        task_uuid=signature.uuid,
        task_name=signature.name,
        state=State.FAILURE,
        error=then.error,
        error_type=then.error_type,
        created_at=now,
        finished_at=now,
        run=state.run,
        attempt=state.attempt,
        queue=state.queue,
        keep_for=state.keep_for,
        root=state.root,
        parent=state.parent,
    )
    firing = Firing(
        task_uuid="" if group_uuid else signature.uuid,
        group_uuid=group_uuid,
        send=out.messages,
        arrivals=arrivals,
        states=(failure, *broken(then, signature, now), *out.states),
    )
    return firing, out.signatures


def fire(app: Application, firing: Firing) -> bool:
    """Fire, as Store.fire; tasks that the store refuses for good fail instead."""
    try:
        return app.store.fire(firing)
    except MachineryError as error:
        if not error.permanent or not firing.send:
            raise
        refused = error
    refusals = [app.refusal(message, refused) for message in firing.send]
    if not app.store.fire(in_place_of(firing, refusals)):
        return False
    for message, refusal in zip(firing.send, refusals, strict=True):
        app.store.give_up(message, refused, refusal.queue)
    return True


def revoked_among(app: Application, signatures: Sequence[Signature[Any]]) -> dict[str, bool]:
    """Return the revoked UUIDs, each with whether its task is over, and only its message left.

    A task is revoked also when its workflow was cancelled. A backend that keeps no revocations is
    not asked.
    """
    backend = app.store.backend
    if not backend.features.revocations:
        return {}
    roots = {one.uuid: one.root for one in signatures if one.headers and one.root}
    flows = {root for root in roots.values() if root.startswith(PREFIX)}
    names = backend.revoked([*(one.uuid for one in signatures), *flows])
    if not names:
        return {}
    found = [
        one.uuid for one in signatures if one.uuid in names or roots.get(one.uuid) in names & flows
    ]
    states = backend.get_states(sorted(found))
    ended = backend.revoked([_ended(uuid) for uuid in found])
    return {
        uuid: states[uuid].is_finished if uuid in states else _ended(uuid) in ended
        for uuid in found
    }


def let_go(app: Application, uuids: Iterable[str]) -> None:
    """Keep these revocations for a short time: the messages of their tasks are gone."""
    names = _both(uuids)
    try:
        if names:
            app.store.backend.revoke(names, REVOKED_LIFE)
    except MachineryError as error:
        logger.debug("revocations are kept for longer than is needed: %s", error)


# Purging a queue: each of its tasks is revoked, in steps of Broker.purge_each.
#
#     1  backend: the tasks are revoked; those that wait become FAILURE, with their follow-up
#     2  broker:  the messages are deleted
#     3  backend: tasks that had begun, and whose messages came back, become FAILURE as well; the
#                 revocations of step 1 are forgotten
#
# After a crash behind 1 the messages are still there, and a worker drops them, as revoked ones.


def purge(app: Application, queue: str, progress: Callable[[int], object] | None = None) -> int:
    """Revoke the tasks that wait in a queue, and delete its messages; return how many.

    Messages without a record of ours, as those of Go programs, are only deleted, and so are those
    of a broker that cannot list them.

    Args:
        progress: called after each step with the number so far.

    Raises:
        BackendUnavailable, BrokerUnavailable, PublishRefused, PublishUnknown: some of it is done;
            repeat it.
    """
    if not app.store.broker.features.peeking:
        count = app.store.broker.purge(queue)
        if progress is not None:
            progress(count)
        return count
    count = 0
    for gone in app.store.broker.purge_each(queue, functools.partial(_end_purged, app, WAITED)):
        count += len(gone)
        _end_purged(app, BEGUN, gone)
        if progress is not None:
            progress(count)
    return count


def _end_purged(app: Application, which: Container[State], messages: Sequence[Message]) -> None:
    """Fail those tasks of purged messages that are in one of these states.

    With WAITED they are revoked before, with BEGUN this is forgotten. Without revocations, a worker
    that claims one meanwhile sees that it is over.
    """
    backend = app.store.backend
    if not backend.features.keeps:
        return
    known, revokes = [one for one in messages if one.uuid], backend.features.revocations
    # A task that waits goes with its timer, or with the result that it waits for.
    known += suspended_by(app, [one for one in known if one.name in SILENT])
    for some in in_steps(known, PURGE_STEP):
        names = _both(one.uuid for one in some)
        if which is WAITED and revokes:
            # Of messages that stay, after all: as of other revoked tasks.
            due = max((one.eta for one in some if one.eta is not None), default=None)
            ahead = (due - app.now()).total_seconds() if due is not None else 0.0
            backend.revoke(names, max(0.0, ahead) + WAITING_LIFE)
        _end_those(app, which, some)
        if which is BEGUN and revokes:
            backend.revoke(names, 0.0)


def _end_those(app: Application, which: Container[State], messages: Sequence[Message]) -> None:
    backend = app.store.backend
    states = backend.get_states([one.uuid for one in messages])
    ending = list[tuple[Signature[Any], Firing, Sequence[Signature[Any]]]]()
    suspended = set[str]()
    for message in messages:
        state = states.pop(message.uuid, None)
        if state is None or state.state not in which:
            continue
        try:
            signature = decode_signature(message.body)
        except DecodeError as error:
            logger.error("what follows task %s cannot be decoded: %s", message.uuid, error)
            continue
        if signature.run == state.run or state.state is State.RETRY:
            ending.append((signature, *end_unheld(app, signature, PURGED, state)))
            if state.error_type == SUSPENDED:
                suspended.add(signature.uuid)
    # One step of the backend for all that send nothing: most do not.
    quiet = [one for one in ending if not one[1].send]
    changes = [change_of(firing) for _, firing, _ in quiet]
    verdicts = backend.apply(changes) if changes else ()
    ended = [one for one, verdict in zip(quiet, verdicts, strict=True) if verdict is SETTLED]
    ended += [one for one in ending if one[1].send and fire(app, one[1])]
    for signature, _, sent in ended:
        if signature.uuid in suspended:
            forget_signals(app, signature.uuid)
            let_go(app, [signature.uuid])  # only its timer is deleted
        app.report_sent(sent)
        _report(app, signature, PURGED)
