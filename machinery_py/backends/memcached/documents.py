"""A task as memcached keeps it: Go's document under the task's UUID, with all that is ours as its last field.

Go's decoder passes over the field, and its writers leave it away. So a task is one item, and one `cas` changes all of it;
an item without the field was written by a Go program.

    {"TaskUUID":…, "State":…, … "TTL":0, "machinery_py":"<base64 of msgpack>"}
"""

from __future__ import annotations

import binascii
import datetime as dt
import hashlib
import re
from collections.abc import Sequence

import msgspec

from machinery_py.backends.transactional import Row
from machinery_py.errors import ArgumentError, DecodeError
from machinery_py.names import shown
from machinery_py.tasks.states import GroupMeta, TaskState
from machinery_py.wire.signatures import decode_group, decode_state, encode_group, encode_state

CHORD_LIFE = (
    7 * 86400.0
)  # seconds that a state is kept that is not finished, and a chord without an arrival
LONGEST_KEY = 250  # bytes
OURS = b"mpy:"  # what begins like this is no document of Go's

_FIELD = b',"machinery_py":"'
_END = b'"}'
_GROUP = b'{"GroupUUID":'
_FORBIDDEN = re.compile(rb"[\x00-\x20\x7f]")


def key_of(name: str, prefix: bytes = b"") -> bytes:
    """The key of something with this name: without prefix, Go's. What memcached refuses as a key is hashed; Go cannot have it."""
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
    """Step that follows once the item of a change is written. Doing it twice does no harm.

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


class Commit(msgspec.Struct, array_like=True, gc=False):
    """The item of a change that has no task: a group that is fired, or messages that are kept for somebody.

    Attributes:
        nonce: names the writing; whoever finds his own knows that a lost reply meant yes.
        kept_at: µs, when the outbox was filled.
    """

    nonce: bytes
    kept_at: int
    outbox: Sequence[bytes] = ()
    todo: Sequence[Todo] = ()


class TaskItem(Row, kw_only=True):
    """A task's item. `changed` asks for it to be written.

    Attributes:
        cas: the number of the item that was read; None if there was none.
        nonce, kept_at, outbox, todo: as of a Commit.
        awaited: a chord will want its results.
        theirs: what was read instead, if it is no state of this task; it is not written over.
    """

    cas: int | None = None
    theirs: str = ""
    nonce: bytes = b""
    kept_at: int = 0
    outbox: Sequence[bytes] = ()
    todo: Sequence[Todo] = ()
    awaited: bool = False


class _Ours(msgspec.Struct, array_like=True, gc=False):
    """The field."""

    nonce: bytes
    epoch: int
    mark: str
    stated: bool
    run: int = 0
    attempt: int = 1
    queue: str = ""
    error_type: str = ""
    traceback: str = ""
    progress: tuple[float, float] | None = None
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    eta: dt.datetime | None = None
    worker: str = ""
    message: bytes = b""
    kept_at: int = 0
    outbox: Sequence[bytes] = ()
    todo: Sequence[Todo] = ()
    awaited: bool = False


pack = msgspec.msgpack.Encoder().encode
decode_commit = msgspec.msgpack.Decoder(Commit).decode
_ours = msgspec.msgpack.Decoder(_Ours).decode
_TEXTS = ("task_uuid", "task_name", "error", "error_type", "traceback", "queue", "worker")
_NOTHING = TaskState(task_uuid="")


def encode_record(uuid: str, record: TaskItem) -> bytes:
    """The item of a task.

    Raises:
        ArgumentError: a result cannot be sent.
    """
    state = record.state or _NOTHING
    try:
        document, ours = _encoded(uuid, state, record)
    except (ArgumentError, UnicodeEncodeError):
        state = _printable(state)
        document, ours = _encoded(uuid, state, record)
    return _with_field(document, ours)


def _encoded(uuid: str, state: TaskState, record: TaskItem) -> tuple[bytes, bytes]:
    stated = record.state is not None
    ours = _Ours(
        nonce=record.nonce,
        epoch=record.epoch,
        mark=record.mark,
        stated=stated,
        run=state.run,
        attempt=state.attempt,
        queue=state.queue,
        error_type=state.error_type,
        traceback=state.traceback,
        progress=state.progress,
        started_at=state.started_at,
        finished_at=state.finished_at,
        eta=state.eta,
        worker=state.worker,
        message=state.message,
        kept_at=record.kept_at,
        outbox=tuple(record.outbox),
        todo=tuple(record.todo),
        awaited=record.awaited,
    )
    return encode_state(state) if stated else _nothing_known(uuid), pack(ours)


def _nothing_known(uuid: str) -> bytes:
    """A document for Go where only an epoch is known: it goes on waiting."""
    document = encode_state(TaskState(task_uuid=uuid.encode("utf-8", "replace").decode()))
    return document.replace(b'"State":"PENDING"', b'"State":""', 1)


def _printable(state: TaskState) -> TaskState:
    """With what has no UTF-8 written out. If that was not what is wrong, encoding it says so."""
    texts = {
        name: getattr(state, name).encode("utf-8", "backslashreplace").decode() for name in _TEXTS
    }
    return msgspec.structs.replace(state, **texts)


def decode_record(uuid: str, body: bytes, cas: int) -> TaskItem:
    """Read an item. Bytes that are no state of this task are `theirs`."""
    document, field = _without_field(body)
    if document.startswith(_GROUP):
        return TaskItem(
            cas=cas, theirs="a group"
        )  # asked for because a group has an outbox as well
    try:
        own = _ours(field) if field else None
        if own is not None and not own.stated:
            return _record(None, own, cas)
        state = decode_state(document)
    except (DecodeError, msgspec.DecodeError) as error:
        return TaskItem(cas=cas, theirs=str(error))
    if uuid and state.task_uuid != uuid.encode("utf-8", "backslashreplace").decode():
        return TaskItem(cas=cas, theirs=f"a state of {shown(state.task_uuid)}")
    if own is None:
        return TaskItem(state=state, cas=cas)
    state = TaskState(
        task_uuid=state.task_uuid,
        task_name=state.task_name,
        state=state.state,
        results=state.results,
        error=state.error,
        created_at=state.created_at,
        ttl=state.ttl,
        run=own.run,
        attempt=own.attempt,
        queue=own.queue,
        error_type=own.error_type,
        traceback=own.traceback,
        progress=own.progress,
        started_at=own.started_at,
        finished_at=own.finished_at,
        eta=own.eta,
        worker=own.worker,
        message=own.message,
    )
    return _record(state, own, cas)


def _record(state: TaskState | None, own: _Ours, cas: int) -> TaskItem:
    return TaskItem(
        state=state,
        mark=own.mark,
        epoch=own.epoch,
        cas=cas,
        nonce=own.nonce,
        kept_at=own.kept_at,
        outbox=own.outbox,
        todo=own.todo,
        awaited=own.awaited,
    )


def kept_for(record: TaskItem, now: dt.datetime, expire_in: float) -> float:
    """Seconds that the item of a task is kept."""
    state = record.state
    if state is not None and state.is_finished:
        return max(expire_in, CHORD_LIFE) if record.awaited else expire_in
    if state is None or state.eta is None or state.eta <= now:
        return CHORD_LIFE
    return CHORD_LIFE + (state.eta - now).total_seconds()


def document_of(state: TaskState) -> bytes:
    """A state for a Todo."""
    return encode_record(state.task_uuid, TaskItem(state=state))


def state_in(document: bytes) -> TaskState | None:
    """From a Todo."""
    return decode_record("", document, 0).state


def encode_meta(group: GroupMeta, kept_at: int) -> bytes:
    """The document of a group, with when it was made."""
    return _with_field(encode_group(group), pack(kept_at))


def is_meta(body: bytes) -> bool:
    """Whether it is the document of a group, and nobody else's."""
    return body.startswith(_GROUP)


def decode_meta(body: bytes) -> tuple[GroupMeta, int]:
    """The group, and when it was made; 0 if a Go program made it.

    Raises:
        DecodeError: it is no group.
    """
    document, field = _without_field(body)
    return decode_group(document), msgspec.msgpack.decode(field, type=int) if field else 0


def _with_field(document: bytes, ours: bytes) -> bytes:
    return document[:-1] + _FIELD + binascii.b2a_base64(ours, newline=False) + _END


def _without_field(body: bytes) -> tuple[bytes, bytes]:
    """Go's document, and our field or b""."""
    if not body.endswith(_END):
        return body, b""  # Go's ends with the number of its TTL
    head, mark, field = body.rpartition(_FIELD)
    if not mark:
        return body, b""
    try:
        return head + b"}", binascii.a2b_base64(field[: -len(_END)], strict_mode=True)
    except binascii.Error:
        return body, b""
