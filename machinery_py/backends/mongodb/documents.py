"""Document of a task: Go's fields, which Go reads and writes, and ours beside them.

    _id, state, task_name, created_at, results, error    Go's
    run, mark, epoch, queue, changed_at, expires_at      ours, for queries
    keep_for                                             likewise, in seconds or null
    version                                              counts our writes; a write names the last
    ours                                                 the whole state, in msgpack
    deed, deed_at                                        the intent: follow-ups still to be done
    outbox, outbox_at                                    messages of the change for another broker

If `state` is another than in `ours`, a Go program was the last writer, and only its fields count.

Limits: Go reads 64-bit integers, floats, booleans, strings and lists of these.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import msgspec
from bson.int64 import Int64
from msgspec.structs import asdict, force_setattr

from machinery_py.backends.base import Change
from machinery_py.backends.transactional import Row
from machinery_py.connections.mongodb.client import Document
from machinery_py.errors import DecodeError, NameRefused
from machinery_py.fences import Fence
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import ZERO_TIME, State, TaskState
from machinery_py.texts import printable, quoted
from machinery_py.wire.states import encode_results, printable_state

_pack = msgspec.msgpack.Encoder().encode
_state = msgspec.msgpack.Decoder(TaskState).decode
_changes = msgspec.msgpack.Decoder(list[Change]).decode
_bodies = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode
_STATES: dict[str, State] = {state.value: state for state in State}
_FIRST = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


class TaskDocument(Row, kw_only=True):
    """A row and what its document was when it was read."""

    version: int = 0  # 0: there is none
    word: str | None = None  # the document's state
    intent: bytes = b""
    intent_at: int = 0


def has_expired(document: Document, now: int) -> bool:
    """Return whether the next sweep will delete the document. `now`: µs."""
    return 0 < (document.get("expires_at") or 0) <= now


#: What Go writes of a task, and its second version.
_GOS = frozenset(
    {"_id", "state", "task_name", "results", "error", "created_at", "delete_at", "ttl"}
)


def refusal_of(document: Document) -> NameRefused | None:
    """Return why a document is not written over: it is no state of a task. None: it is one."""
    word = document.get("state")
    if (
        isinstance(word, str)
        and (not word or word in _STATES)
        and ("version" in document or document.keys() <= _GOS)
    ):
        return None
    uuid, fields = str(document["_id"]), ", ".join(sorted(map(str, document)))
    return NameRefused(
        f"document {quoted(uuid)} in MongoDB's collection 'tasks' is no state of a task, and was "
        f"left as it is (choose another UUID): it has the fields {quoted(fields)}",
        uuid,
    )


def kept_of(document: Document, now: int) -> TaskDocument:
    """Read a document to write over it; an expired one as if it had no state.

    Raises:
        NameRefused: it is no state of a task.
    """
    refusal = refusal_of(document)
    if refusal is not None:
        raise refusal
    over = has_expired(document, now)
    return TaskDocument(
        state=None if over else state_of(document),
        mark="" if over else str(document.get("mark") or ""),
        epoch=Fence(int(document.get("epoch") or 0)),
        version=int(document.get("version") or 0),
        word=str(document.get("state") or ""),
        intent=bytes(document.get("deed") or b""),
        intent_at=int(document.get("deed_at") or 0),
    )


def state_of(document: Document) -> TaskState | None:
    """Return the state; None while only a delivery has begun."""
    word = document.get("state")
    if not word:
        return None
    ours = document.get("ours")
    if ours:
        state = _state(ours)
        force_setattr(state, "results", tuple(state.results))
        if state.state == word:
            return state
        base = state
    else:
        base = TaskState(task_uuid=str(document["_id"]))
    if word not in _STATES:
        raise DecodeError(
            f"state of {document['_id']!r} is {word!r} (known: {', '.join(_STATES)}); another "
            "program has written to the document (choose another UUID, or delete it)"
        )
    created_at = document.get("created_at")
    return TaskState(
        task_uuid=base.task_uuid,
        task_name=str(document.get("task_name") or base.task_name),
        state=_STATES[word],
        results=[_result(one) for one in document.get("results") or ()]
        if word == State.SUCCESS
        else (),
        error=str(document.get("error") or ""),
        run=base.run,
        queue=base.queue,
        created_at=created_at if isinstance(created_at, dt.datetime) else base.created_at,
    )


def _result(one: Any) -> Arg:
    return Arg(type=str(one.get("type", "")), value=one.get("value"))


def fields_of(row: Row, *, version: int, now: int, expires_at: int) -> Document:
    """Return all that a write sets, but for `_id` and `created_at`."""
    state = row.state
    if state is None:
        return {"version": version, "epoch": row.epoch, "mark": row.mark}
    try:
        ours = _pack(asdict(state))  # all of it, as it ever was
    except (UnicodeEncodeError, OverflowError):
        encode_results(state.results)  # raises ArgumentError if it is one of these
        state = printable_state(state)
        ours = _pack(asdict(state))
    return {
        "state": state.state._value_,
        "task_name": state.task_name,
        "results": [{"type": arg.type, "value": go_value(arg.value)} for arg in state.results],
        "error": state.error,
        "run": state.run,
        "mark": row.mark,
        "epoch": row.epoch,
        "queue": state.queue,
        "changed_at": now,
        "expires_at": expires_at if state.is_finished else 0,
        "keep_for": state.keep_for,
        "version": version,
        "ours": ours,
    }


def new_document(
    uuid: str, row: Row, *, now: int, expires_at: int, moment: dt.datetime
) -> Document:
    """Return the document of a task that has none yet, with every field that a query names."""
    created_at = (
        moment if row.state is None or row.state.created_at == ZERO_TIME else row.state.created_at
    )
    return {
        "_id": uuid,
        "state": "",
        "task_name": "",
        "created_at": max(created_at, _FIRST),
        "results": [],
        "error": "",
        "run": 0,
        "queue": "",
        "changed_at": now,
        "expires_at": 0,
        "deed": b"",
        "deed_at": 0,
        "outbox": b"",
        "outbox_at": 0,
        **fields_of(row, version=1, now=now, expires_at=expires_at),
    }


def go_value(value: Any) -> Any:
    """Return a result as Go reads it, with integers of 64 bits; what BSON cannot hold, as text."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return Int64(value) if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, list | tuple):
        return [go_value(one) for one in value]
    if isinstance(value, dict):
        return {_key(key): go_value(one) for key, one in value.items()}
    return printable(value) if isinstance(value, str) else value


def _key(key: Any) -> str:
    """BSON's names hold no NUL."""
    return printable(str(key)).replace("\0", "\\0")


def packed_intent(change: Change) -> bytes:
    """Encode the steps that are left once the state of the change's key is written."""
    others = [state for state in change.states if state.task_uuid != change.key]
    if not others and not change.groups and not change.arrivals:
        return b""
    return _pack([msgspec.structs.replace(change, states=others, outbox=(), epoch=0)])


def packed_changes(changes: Sequence[Change]) -> bytes:
    return _pack(changes)


def unpacked_changes(intent: bytes) -> list[Change]:
    return _changes(intent) if intent else []


def packed_outbox(bodies: Sequence[bytes]) -> bytes:
    return _pack(tuple(bodies)) if bodies else b""


def unpacked_outbox(outbox: bytes) -> Sequence[bytes]:
    return _bodies(outbox) if outbox else ()
