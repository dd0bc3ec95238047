"""Item of a task in memcached: Go's document under the task's UUID, with a last field of ours.

Go's decoder passes over the field, and Go's writers leave it out. So a task is one item, and one
`cas` changes all of it; a Go program wrote an item without the field.

    {"TaskUUID":…, "State":…, … "TTL":0, "machinery_py":"<base64 of msgpack>"}
"""

from __future__ import annotations

import binascii
import datetime as dt
import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from machinery_py.backends.go_documents import (
    encode_document,
    is_state_of,
    with_field,
    without_field,
)
from machinery_py.backends.transactional import Row
from machinery_py.connections.memcached.keys import FIRED, OURS
from machinery_py.fences import Fence
from machinery_py.tasks.states import GroupMeta, TaskState
from machinery_py.texts import quoted
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.states import (
    decode_group,
    decode_state,
    encode_group,
    extra_fields,
    extra_of,
)

CHORD_LIFE = 7 * 86400.0  # seconds that an unfinished state is kept, and a chord without an arrival
LONGEST_KEY = 250  # bytes

_GROUP = b'{"GroupUUID":'
_FORBIDDEN = re.compile(rb"[\x00-\x20\x7f]")


def key_of(name: str, prefix: bytes = b"") -> bytes:
    """Return the key of a name, without prefix Go's; a name that memcached refuses is hashed."""
    raw = name.encode("utf-8", "surrogatepass")
    key = prefix + raw
    if (
        not raw
        or len(key) > LONGEST_KEY
        or _FORBIDDEN.search(raw)
        or (not prefix and raw.startswith(OURS))
    ):
        return (prefix or OURS) + b"sha256:" + hashlib.sha256(raw).hexdigest().encode()
    return key


class Todo(msgspec.Struct, array_like=True, gc=False):
    """Follow-ups, once the item of a change is written. They may be done twice.

    Attributes:
        states: of other tasks, as documents. `force`: they replace what is there.
        groups: documents.
        arrivals: group, member, total, whether it succeeded.
    """

    states: Sequence[bytes] = ()
    groups: Sequence[bytes] = ()
    arrivals: Sequence[tuple[str, str, int, bool]] = ()
    force: bool = False

    def __bool__(self) -> bool:
        return bool(self.states or self.groups or self.arrivals)


class TaskItem(Row, kw_only=True):
    """Item of a task, or of a group's firing. `changed` asks for it to be written.

    Attributes:
        nonce: of the writing: a writer that finds its own knows that the lost reply meant yes.
        kept_at: µs, when the outbox was filled.
        outbox, todo: messages to be published, and follow-ups, of the last change.
        awaited: a chord will want its results.
        theirs: what was read instead, if it is no state of this task; it is not written over.
    """

    theirs: str = ""
    nonce: bytes = b""
    kept_at: int = 0
    outbox: Sequence[bytes] = ()
    todo: Sequence[Todo] = ()
    awaited: bool = False


@extra_fields(before="kept_at")
class _Ours(msgspec.Struct, array_like=True, gc=False):
    """Our field in the item of a task."""

    nonce: bytes
    epoch: Fence
    mark: str
    stated: bool
    kept_at: int = 0
    outbox: Sequence[bytes] = ()
    todo: Sequence[Todo] = ()
    awaited: bool = False


class _Firing(msgspec.Struct, array_like=True, gc=False):
    """Item of a group's firing, which no Go program reads; the version before wrote the same."""

    nonce: bytes
    kept_at: int
    outbox: Sequence[bytes] = ()
    todo: Sequence[Todo] = ()


pack: Final = msgspec.msgpack.Encoder().encode
_ours = msgspec.msgpack.Decoder(_Ours).decode
_firing = msgspec.msgpack.Decoder(_Firing).decode


#: Fields of a task's item that our field keeps beside those of the state.
_SHARED = ("nonce", "epoch", "mark", "kept_at", "outbox", "todo", "awaited")


def _shared(record: TaskItem | _Ours) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _SHARED}


def encode_record(uuid: str, record: TaskItem, prefix: bytes = b"") -> bytes:
    """Return the item of a task, or with the prefix FIRED of a firing.

    Raises:
        ArgumentError: a result cannot be sent.
    """
    if prefix == FIRED:
        return pack(_Firing(record.nonce, record.kept_at, record.outbox, record.todo))

    def field(state: TaskState) -> bytes:
        stated = record.state is not None
        return _quoted(pack(_Ours(stated=stated, **_shared(record), **extra_of(state))))

    return encode_document(uuid, record.state, field)


def decode_record(uuid: str, body: bytes, prefix: bytes = b"") -> TaskItem:
    """Read an item, as `encode_record`. Bytes that are no state of this task are `theirs`."""
    if prefix == FIRED:
        return _decode_firing(body)
    document, field = _split(body)
    if document.startswith(_GROUP):
        return TaskItem(theirs="a group")  # asked for because a group has an outbox as well
    try:
        own = _ours(field) if field else None
        if own is not None and not own.stated:
            return TaskItem(**_shared(own))
        state = decode_state(document)
    except MALFORMED as error:
        return TaskItem(theirs=str(error))
    if uuid and not is_state_of(uuid, state):
        return TaskItem(theirs=f"a state of {quoted(state.task_uuid)}")
    if own is None:
        return TaskItem(state=state)
    return TaskItem(state=msgspec.structs.replace(state, **extra_of(own)), **_shared(own))


def _decode_firing(body: bytes) -> TaskItem:
    try:
        one = _firing(body)
    except MALFORMED as error:
        return TaskItem(theirs=str(error))
    return TaskItem(nonce=one.nonce, kept_at=one.kept_at, outbox=one.outbox, todo=one.todo)


def kept_for(record: TaskItem, now: dt.datetime, expire_in: float) -> float:
    """Return the seconds that the item of a task is kept."""
    state = record.state
    if state is not None and state.is_finished:
        life = state.life(expire_in)
        return max(life, CHORD_LIFE) if record.awaited else life
    if state is None or state.eta is None or state.eta <= now:
        return CHORD_LIFE
    return CHORD_LIFE + (state.eta - now).total_seconds()


def document_of(state: TaskState) -> bytes:
    """Encode a state for a Todo."""
    return encode_record(state.task_uuid, TaskItem(state=state))


def state_in(document: bytes) -> TaskState | None:
    """Decode a state of a Todo."""
    return decode_record("", document).state


def encode_meta(group: GroupMeta, kept_at: int) -> bytes:
    """Encode a group, with the moment (µs) at which it was made."""
    return with_field(encode_group(group), _quoted(pack(kept_at)))


def is_meta(body: bytes) -> bool:
    """Return whether it is the document of a group, and nobody else's."""
    return body.startswith(_GROUP)


def decode_meta(body: bytes) -> tuple[GroupMeta, int]:
    """Decode a group, and the moment (µs) at which it was made; 0 if a Go program made it.

    Raises:
        DecodeError: it is no group.
    """
    document, field = _split(body)
    return decode_group(document), msgspec.msgpack.decode(field, type=int) if field else 0


def _quoted(ours: bytes) -> bytes:
    return b'"' + binascii.b2a_base64(ours, newline=False) + b'"'


def _split(body: bytes) -> tuple[bytes, bytes]:
    """Return Go's document and what our field holds, or b"". A Go result may look like it."""
    document, field = without_field(body)
    if field[:1] != b'"' or field[-1:] != b'"':
        return body, b""
    try:
        return document, binascii.a2b_base64(field[1:-1], strict_mode=True)
    except binascii.Error:
        return body, b""
