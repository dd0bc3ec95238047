"""Chords: send the callback of a complete group once, or fail it when a member failed.

A ready group stays on the store's list until a worker has settled it: a crash at any point here
loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from machinery_py.app import Application
from machinery_py.backends.base import ReadyGroup
from machinery_py.errors import DecodeError, MachineryError, NameRefused, StateNotFound
from machinery_py.names import check_uuid
from machinery_py.registry.outcomes import CHORD_FAILED, Failed
from machinery_py.revocation import end_unheld, fire
from machinery_py.stores.base import AWAY, Firing
from machinery_py.tasks.signature import Signature
from machinery_py.tasks.states import TaskState
from machinery_py.tasks.workflow import chord_callback
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.hooks import text_of

logger = get_logger(__name__)

BATCH = 100  # groups that are asked for at once


def settle_ready_groups(app: Application) -> list[str]:
    """Settle the groups that are ready, and return those that this caller settled.

    Groups that cannot be settled now keep none behind them waiting.
    """
    settled, left = list[str](), set[str]()
    while True:
        ready = app.store.ready_groups(BATCH + len(left))
        new = [group for group in ready if group.group_uuid not in left]
        if not new:
            return settled
        left.update(group.group_uuid for group in new if not _settle(app, group))
        settled += [group.group_uuid for group in new if group.group_uuid not in left]


def _settle(app: Application, ready: ReadyGroup) -> bool:
    try:
        firing, sent = _firing(app, ready)
        settled = fire(app, firing)
    except Exception as error:  # the groups behind it must not wait for it
        if isinstance(error, MachineryError) and error.permanent:
            # The store cannot take its callback, or its state; the group must end all the same.
            logger.error("group %s ends without its callback: %s", ready.group_uuid, error)
            return app.store.fire(Firing(group_uuid=ready.group_uuid))
        if isinstance(error, AWAY):
            raise
        logger.exception("group %s cannot be settled now", ready.group_uuid)
        return False
    if settled:
        app.report_sent(sent)
    return settled


def _firing(app: Application, ready: ReadyGroup) -> tuple[Firing, Sequence[Signature[Any]]]:
    """Return what the store is to commit for this group, and the signatures sent by it."""
    try:
        callback = decode_signature(ready.callback).with_uuid("chord_")
        # Its state is written in any case.
        check_uuid(callback.uuid, callback.routing_key, app.config.default_queue)
    except (DecodeError, NameRefused) as error:
        # The members carried bytes that are no callback; the group must end all the same.
        logger.error("the callback of %s cannot be sent: %s", ready.group_uuid, error)
        return Firing(group_uuid=ready.group_uuid), ()
    if ready.failed_member:
        return _failed(app, ready, callback, _why(app, ready.failed_member))
    try:
        states = app.store.backend.group_task_states(ready.group_uuid)
        filled = chord_callback(callback, [state.results for state in states])
        out = app.outgoing([filled])
    except StateNotFound as error:
        return _failed(
            app,
            ready,
            callback,
            f"the results of the chord's members are not there any more: {error}",
        )
    except NameRefused as error:
        return _failed(app, ready, callback, f"the chord's callback cannot be sent: {error}")
    except AWAY:
        raise
    except Exception as error:  # the pre-publish hook is user code; the chord must end all the same
        return _failed(
            app, ready, callback, f"the chord's callback cannot be sent: {text_of(error)}"
        )
    firing = Firing(
        group_uuid=ready.group_uuid, states=out.states, send=out.messages, groups=out.groups
    )
    return firing, out.signatures


def _why(app: Application, member: str) -> str:
    state = app.store.backend.get_states([member]).get(member)
    if state is None:
        # A step in front of the member failed, so the member itself never ran.
        return f"chord member {member} never ran, because a task in front of it failed"
    return f"chord member {state.task_name} {member} failed: {state.error}"


def _failed(
    app: Application, ready: ReadyGroup, callback: Signature[Any], error: str
) -> tuple[Firing, Sequence[Signature[Any]]]:
    outcome = Failed(error=error, error_type=CHORD_FAILED, retryable=False)
    state = app.store.backend.get_states([callback.uuid]).get(callback.uuid)
    if state is not None and state.is_finished:  # revoked: its end was settled then
        return Firing(group_uuid=ready.group_uuid), ()
    queue = callback.routing_key or app.config.default_queue
    stands = TaskState(
        task_uuid=callback.uuid,
        run=callback.run,
        attempt=callback.attempt,
        queue=queue,
        keep_for=app.life_of(callback),
        root=callback.root,
        parent=callback.parent,
    )
    return end_unheld(app, callback, outcome, stands, group_uuid=ready.group_uuid)
