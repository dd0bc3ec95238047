"""Calls of tasks, as far as they are known: what each of them was called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machinery_py.app import Application
from machinery_py.errors import DecodeError, MachineryError
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import State, TaskState
from machinery_py.wire.signatures import decode_signature

PEEKED = 200  # messages of a queue that are looked at for a list

WAITING = frozenset((State.PENDING, State.RETRY))


def decoded(body: bytes) -> Signature[object] | None:
    """Return the signature; None if the bytes are none."""
    try:
        return decode_signature(body) if body else None
    except DecodeError:
        return None


def kept_call(state: TaskState) -> Signature[object] | None:
    """Return the message in a state. Of a task that waits the state has a part of it only."""
    return None if state.state in WAITING else decoded(state.message)


def calls_of(app: Application, states: Sequence[TaskState]) -> Mapping[str, Sequence[Arg]]:
    """Return the arguments of these tasks, by their UUIDs; without those that are not known.

    They are known of tasks that are among the next to run, and where the state has the message.
    """
    found = {one.task_uuid: kept.args for one in states if (kept := kept_call(one)) is not None}
    waiting = [one for one in states if one.state in WAITING]
    broker = app.store.broker
    if not (waiting and broker.features.peeking):
        return found
    uuids = {one.task_uuid for one in waiting}
    try:
        messages = broker.delayed(PEEKED) if any(one.eta for one in waiting) else []
        for queue in {one.queue for one in waiting}:
            messages = [*messages, *broker.pending(queue, PEEKED)]
    except MachineryError:  # the list is worth more than this column
        return found
    for message in messages:
        if message.uuid in uuids and (signature := decoded(message.body)) is not None:
            found[message.uuid] = signature.args
    return found
