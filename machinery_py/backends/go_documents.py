"""Go's document of a task with our field as its last, as RabbitMQ and memcached keep it.

    {"TaskUUID":…, "State":…, … "TTL":0,"machinery_py":<field>}

Go's decoder passes over the field, and Go's writers leave it out: a document without it was
written by a Go program.
"""

from __future__ import annotations

from collections.abc import Callable

from machinery_py.errors import ArgumentError
from machinery_py.tasks.states import TaskState
from machinery_py.texts import printable
from machinery_py.wire.states import encode_state, printable_state

_FIELD = b',"machinery_py":'
_NO_STATE = TaskState(task_uuid="")


def encode_document(
    uuid: str, state: TaskState | None, field: Callable[[TaskState], bytes]
) -> bytes:
    """Return the document of a task. `field` encodes our field of a state, or of an empty one.

    Raises:
        ArgumentError: a result cannot be sent.
    """
    try:
        return _encoded(uuid, state, field)
    except (ArgumentError, UnicodeEncodeError):
        if state is None:
            raise
        # Encode it with surrogates written out; if something else is wrong, this raises again.
        return _encoded(uuid, printable_state(state), field)


def _encoded(uuid: str, state: TaskState | None, field: Callable[[TaskState], bytes]) -> bytes:
    if state is not None:
        document = encode_state(state)
    else:  # only an epoch is known: a Go program that waits for the task goes on waiting
        name = uuid.encode("utf-8", "replace").decode()
        document = encode_state(TaskState(task_uuid=name)).replace(
            b'"State":"PENDING"', b'"State":""', 1
        )
    return with_field(document, field(state or _NO_STATE))


def with_field(document: bytes, field: bytes) -> bytes:
    """Return a document of Go's with our field, which is JSON already."""
    return document[:-1] + _FIELD + field + b"}"


def without_field(body: bytes) -> tuple[bytes, bytes]:
    """Return Go's document and our field, or what looks like it; b"" if there is none."""
    head, mark, field = body.rpartition(_FIELD)
    return (head + b"}", field[:-1]) if mark else (body, b"")


def is_state_of(uuid: str, state: TaskState) -> bool:
    """Return whether a decoded state is of the task with this UUID."""
    return state.task_uuid == printable(uuid)
