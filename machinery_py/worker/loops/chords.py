"""Chords: send the callback of a complete group once, or fail it when a member failed.

A ready group stays on the store's list until a worker has settled it: a crash at any point here
loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.backends.base import ReadyGroup
from machinery_py.errors import DecodeError, MachineryError, NameRefused, StateNotFound
from machinery_py.names import check_uuid
from machinery_py.registry.outcomes import (
    CHORD_FAILED,
    REVOKED,
    STEP_FAILED,
    Failed,
    Succeeded,
    follow_up,
)
from machinery_py.revocation import end_unheld, fire, revoked_among
from machinery_py.stores.base import AWAY, Firing
from machinery_py.tasks.context import on_behalf_of
from machinery_py.tasks.lineage import kin_of, lasts_of
from machinery_py.tasks.signature import HEADER_COLLECT, Signature
from machinery_py.tasks.states import Arrival, TaskState
from machinery_py.tasks.workflow import JOIN, chord_callback, chord_results, is_tolerant
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.running.hooks import text_of

logger = get_logger(__name__)

BATCH = 100  # groups that are asked for at once
_STEP = re.compile(r"step .+? (\S+) failed: ", re.DOTALL)  # as outcomes.broken writes it


def settle_ready_groups(
    app: Application, note: Callable[[Sequence[Arrival]], object] | None = None
) -> list[str]:
    """Settle the groups that are ready, and return those that this caller settled.

    Groups that cannot be settled now keep none behind them waiting.

    Args:
        note: called with the arrivals in other groups that follow.
    """
    settled, left = list[str](), set[str]()
    while True:
        ready = app.store.ready_groups(BATCH + len(left))
        new = [group for group in ready if group.group_uuid not in left]
        if not new:
            return settled
        left.update(group.group_uuid for group in new if not _settle(app, group, note))
        settled += [group.group_uuid for group in new if group.group_uuid not in left]


def _settle(
    app: Application, ready: ReadyGroup, note: Callable[[Sequence[Arrival]], object] | None
) -> bool:
    try:
        firing, sent = _firing(app, ready)
        settled = fire(app, firing)
    except Exception as error:  # the groups behind it must not wait for it
        if isinstance(error, MachineryError) and error.permanent:
            return _end_refused(app, ready, error)
        if isinstance(error, AWAY):
            raise
        logger.exception("group %s cannot be settled now", ready.group_uuid)
        return False
    if settled:
        app.report_sent(sent)
        if note is not None and firing.arrivals:
            note(firing.arrivals)
    return settled


def _end_refused(app: Application, ready: ReadyGroup, refusal: MachineryError) -> bool:
    """Let a group end whose callback, or its state, the store cannot take: the callback fails."""
    text = f"the chord's callback cannot be sent: {text_of(refusal)}"
    outcome = Failed(error=text, error_type=CHORD_FAILED, retryable=False)
    try:
        callback = decode_signature(ready.callback).with_uuid("chord_")
        firing, sent = _failed(app, ready, callback, outcome)
        settled = fire(app, firing)
    except Exception as error:  # the group must end all the same
        if isinstance(error, AWAY) and not error.permanent:
            raise
        logger.error("group %s ends without its callback: %s", ready.group_uuid, refusal)
        return app.store.fire(Firing(group_uuid=ready.group_uuid))
    if settled:
        logger.error("group %s: %s", ready.group_uuid, text)
        app.report_sent(sent)
    return settled


def _firing(app: Application, ready: ReadyGroup) -> tuple[Firing, Sequence[Signature[Any]]]:
    """Return what the store is to commit for this group, and the signatures sent by it."""
    try:
        callback = decode_signature(ready.callback).with_uuid("chord_")
        callbacks: Sequence[Signature[Any]] = (callback,)
        if _is_bundle(callback):
            kin = kin_of(callback)
            callbacks = [one.with_headers(**{**kin, **one.headers}) for one in callback.on_success]
        for one in callbacks:  # its state is written in any case
            check_uuid(one.uuid, one.routing_key, app.config.default_queue)
    except (DecodeError, NameRefused) as error:
        # The members carried bytes that are no callback; the group must end all the same.
        logger.error("the callback of %s cannot be sent: %s", ready.group_uuid, error)
        return Firing(group_uuid=ready.group_uuid), ()
    if ready.failed_member and not _goes_on(app, ready, callback):
        return _failed(app, ready, callback, _why(app, ready.failed_member, callback))
    try:
        states = app.store.backend.group_results(ready.group_uuid)
        results = chord_results(callback, states)
        return _succeeded(app, ready, [chord_callback(one, results) for one in callbacks])
    except StateNotFound as error:
        text = f"the results of the chord's members are not there any more: {error}"
    except NameRefused as error:
        text = f"the chord's callback cannot be sent: {error}"
    except AWAY:
        raise
    except Exception as error:  # the pre-publish hook is user code; the chord must end all the same
        text = f"the chord's callback cannot be sent: {text_of(error)}"
    return _failed(
        app, ready, callback, Failed(error=text, error_type=CHORD_FAILED, retryable=False)
    )


def _goes_on(app: Application, ready: ReadyGroup, callback: Signature[Any]) -> bool:
    """Return whether the group goes on without the members that have failed.

    Of a tolerant group a member counts as failed if none has run; or if worker/loops/go_groups.py
    has found that all are over.
    """
    if not is_tolerant(callback):
        return False
    try:
        states = app.store.backend.group_task_states(ready.group_uuid)
    except StateNotFound:
        return False
    failed = [one for one in states if one.task_uuid == ready.failed_member]
    return all(one.is_finished for one in states) and any(
        one.error_type != STEP_FAILED for one in failed
    )


def _is_bundle(callback: Signature[Any]) -> bool:
    """Return whether it stands for several callbacks: not one that gathers, which is a member."""
    return callback.name == JOIN and HEADER_COLLECT not in callback.headers


def _succeeded(
    app: Application, ready: ReadyGroup, filled: Sequence[Signature[Any]]
) -> tuple[Firing, Sequence[Signature[Any]]]:
    """Send the callbacks. One that gathers succeeds here and now, with the list it has got."""
    gathering = [one for one in filled if one.name == JOIN]
    out = app.outgoing([one for one in filled if one.name != JOIN])
    firings = [Firing(states=out.states, send=out.messages, groups=out.groups)]
    sent = list(out.signatures)
    # What runs in a worker is dropped there.
    revoked = revoked_among(app, gathering) if gathering else {}
    for one in gathering:
        if one.uuid not in revoked:
            firing, signatures = _gathered(app, one)
        elif revoked[one.uuid]:
            continue  # its end was settled when it was revoked
        else:
            firing, signatures = _failed_one(app, ready, one, REVOKED)
        firings.append(firing)
        sent += signatures
    return _together(ready, firings), sent


def _gathered(app: Application, one: Signature[Any]) -> tuple[Firing, Sequence[Signature[Any]]]:
    now = app.now()
    then = follow_up(one, Succeeded(one.args), now=now)
    state = msgspec.structs.replace(
        app.pending(one, now), state=then.state, results=then.results, finished_at=now, message=b""
    )
    with on_behalf_of(one, queue=one.routing_key or app.config.default_queue):
        out, arrivals = app.outgoing(then.send), app.arrivals(then.arrived)
    states = (state, *out.states)
    firing = Firing(states=states, send=out.messages, groups=out.groups, arrivals=arrivals)
    return firing, out.signatures


def _together(ready: ReadyGroup, firings: Sequence[Firing]) -> Firing:
    return Firing(
        group_uuid=ready.group_uuid,
        states=[state for one in firings for state in one.states],
        send=[message for one in firings for message in one.send],
        groups=[group for one in firings for group in one.groups],
        arrivals=[arrival for one in firings for arrival in one.arrivals],
    )


def _why(app: Application, member: str, callback: Signature[Any]) -> Failed:
    """Return the failure of a chord, which names the member, or the task in front of it."""
    # When a task in front of the whole group failed, only the last step of the chain says so.
    after = (callback, *callback.on_success) if _is_bundle(callback) else (callback,)
    lasts = [uuid for one in after for uuid in (one.uuid, *(uuid for uuid, _ in lasts_of(one)))]
    states = app.store.backend.get_states([member, *lasts])
    broken = [states[uuid] for uuid in lasts if uuid in states and _STEP.match(states[uuid].error)]
    state = states.get(member) or next(iter(broken), None)
    if state is None:
        text = f"chord member {member} never ran, because a task in front of it failed"
        return Failed(error=text, error_type=CHORD_FAILED, retryable=False, cause=("", member, ""))
    ran = member in states and state.error_type != STEP_FAILED
    named = f"{state.task_name} {member} failed" if ran else f"{member} never ran"
    text = f"chord member {named}: {state.error}"
    if state.error_type == STEP_FAILED and (step := _STEP.match(state.error)):
        state = app.store.backend.get_states([step[1]]).get(step[1], state)
    cause = state.task_name, state.task_uuid, state.error_type
    return Failed(error=text, error_type=CHORD_FAILED, retryable=False, cause=cause)


def _failed(
    app: Application, ready: ReadyGroup, callback: Signature[Any], outcome: Failed
) -> tuple[Firing, Sequence[Signature[Any]]]:
    """Fail all callbacks that it stands for, and send what the group catches."""
    firings: list[Firing] = []
    sent: list[Signature[Any]] = []
    callbacks: Sequence[Signature[Any]] = (callback,)
    if _is_bundle(callback):
        callbacks, bare = callback.on_success, callback.replace(on_success=())
        _, out = app.failed_unheld(bare, outcome, queue=app.config.default_queue)
        firings.append(Firing(states=out.states, send=out.messages))
        sent += out.signatures
    known = app.store.backend.get_states([one.uuid for one in callbacks])
    for one in callbacks:
        state = known.get(one.uuid)
        if state is not None and state.is_finished and state.error_type != STEP_FAILED:
            continue  # revoked: its end was settled then
        firing, signatures = _failed_one(app, ready, one, outcome)
        firings.append(firing)
        sent += signatures
    return _together(ready, firings), sent


def _failed_one(
    app: Application, ready: ReadyGroup, one: Signature[Any], outcome: Failed
) -> tuple[Firing, Sequence[Signature[Any]]]:
    stands = TaskState(
        task_uuid=one.uuid,
        run=one.run,
        attempt=one.attempt,
        queue=one.routing_key or app.config.default_queue,
        keep_for=app.life_of(one),
        root=one.root,
        parent=one.parent,
    )
    return end_unheld(app, one, outcome, stands, group_uuid=ready.group_uuid)
