"""Calls of tasks, as far as they are known: what each of them was called with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from machinery_py.errors import DecodeError
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import State, TaskState
from machinery_py.wire.signatures import decode_signature

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


def calls_of(states: Iterable[TaskState]) -> Mapping[str, Sequence[Arg]]:
    """Return the arguments of these tasks, by their UUIDs; without those that are not known."""
    return {one.task_uuid: kept.args for one in states if (kept := kept_call(one)) is not None}
