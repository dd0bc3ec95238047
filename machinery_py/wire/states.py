"""Bytes and the records of backends: TaskState, GroupMeta, results, as Go Machinery writes them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec.json import Decoder

from machinery_py.errors import DecodeError
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import GroupMeta, TaskState
from machinery_py.tasks.states import State as StateName
from machinery_py.texts import printable
from machinery_py.values.json_values import shown
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.decode import ReceivedArg, is_text_needed, received
from machinery_py.wire.depth import AROUND_RESULTS, is_deep
from machinery_py.wire.go_json import GROUP, STATE, GoJsonReader, read_args, read_record
from machinery_py.wire.signatures import (
    WrittenResult,
    encode,
    explain,
    format_time,
    write_results,
)
from machinery_py.wire.times import parse_time

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _State(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    TaskUUID: str
    TaskName: str
    State: StateName
    Results: list[ReceivedArg] | None
    Error: str
    CreatedAt: str
    TTL: _Int64


class _WrittenState(msgspec.Struct, gc=False):
    TaskUUID: str
    TaskName: str
    State: str
    Results: list[WrittenResult] | None
    Error: str
    CreatedAt: str
    TTL: _Int64


class _GroupDocument(msgspec.Struct, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    GroupUUID: str
    TaskUUIDs: list[str] | None
    ChordTriggered: bool
    Lock: bool
    CreatedAt: str
    TTL: _Int64
    Plan: str = ""  # ours; Go knows nothing of it


_FIELDS = msgspec.structs.fields(TaskState)
_TEXTS = tuple(field.name for field in _FIELDS if field.type is str)

#: The fields of TaskState that Go does not know, in the order in which they were introduced. Stores
#: keep them beside Go's document, and take their names from here: a new field needs a line at the
#: end of TaskState, and a column in SQLite (connections/sqlite/schema.py).
EXTRA = _FIELDS[len(msgspec.structs.fields(_State)) :]
EXTRA_NAMES = tuple(field.name for field in EXTRA)
EXTRA_MOMENTS = frozenset(field.name for field in EXTRA if field.type == dt.datetime | None)
_FIRST_EXTRA = EXTRA_NAMES.index("message") + 1  # how many there were when records were laid out
_extra_values: Callable[[object], tuple[Any, ...]] = attrgetter(*EXTRA_NAMES)
_StructT = TypeVar("_StructT", bound=msgspec.Struct)

_decode_state = Decoder(_State).decode
_decode_group = Decoder(_GroupDocument).decode
_decode_results = Decoder(list[ReceivedArg]).decode


def _moment(text: str) -> dt.datetime:
    try:
        return parse_time(text)
    except DecodeError as error:
        raise DecodeError(f"no task state: CreatedAt {error}") from None


def encode_state(state: TaskState) -> bytes:
    """Return the state as Go writes it, with Go's seven fields.

    Raises:
        ArgumentError: a result cannot be sent.
    """
    done = state.state is StateName.SUCCESS
    results = write_results(state.results, state.task_name) if done else None
    created_at = format_time(state.created_at)
    written = _WrittenState(
        state.task_uuid,
        state.task_name,
        state.state._value_,
        results,
        state.error,
        created_at,
        state.ttl,
    )
    try:
        return encode(written)
    except (UnicodeEncodeError, RecursionError, TypeError, OverflowError) as error:
        raise explain(state.results, state.task_name, "result", error) from None


def decode_state(body: bytes) -> TaskState:
    """Return the state in these bytes, which any Go or Python program may have written.

    Raises:
        DecodeError: Go would not read it, or its state is none of the six.
    """
    if is_deep(body):
        return _decode_state_leniently(body)
    try:
        read = _decode_state(body)
    except MALFORMED:
        return _decode_state_leniently(body)
    if read.Results and is_text_needed(read.Results, body):
        return _decode_state_leniently(body)
    return TaskState(
        task_uuid=read.TaskUUID,
        task_name=read.TaskName,
        state=read.State,
        results=tuple(read.Results) if read.Results else (),
        error=read.Error,
        created_at=_moment(read.CreatedAt),
        ttl=read.TTL,
    )


def _decode_state_leniently(body: bytes) -> TaskState:
    fields, _ = read_record(body, STATE, "task state")
    word = fields.pop("state", "")
    try:
        fields["state"] = StateName(word)
    except ValueError:
        known = ", ".join(StateName)
        raise DecodeError(f"no task state: its state is {shown(word)} (known: {known})") from None
    fields["results"] = received(fields.get("results", ()))
    fields.setdefault("task_uuid", "")
    return TaskState(**fields)


def printable_state(state: TaskState) -> TaskState:
    """Return the state with surrogates, which UTF-8 cannot encode, written out (as `\\ud800`)."""
    texts = {name: printable(getattr(state, name)) for name in _TEXTS}
    return msgspec.structs.replace(state, **texts)


def extra_fields(*, before: str = "") -> Callable[[type[_StructT]], type[_StructT]]:
    """Add the fields of EXTRA to a store's record, in front of its field `before` or at its end.

    Later fields always go to the end: older programs ignore the rest of an array.
    """

    def extended(record: type[_StructT]) -> type[_StructT]:
        own = [_declared(field) for field in msgspec.structs.fields(record)]
        at = [name for name, *_ in own].index(before) if before else len(own)
        extra = [_declared(field) for field in EXTRA]
        config = record.__struct_config__
        more = msgspec.defstruct(
            record.__name__,
            [*own[:at], *extra[:_FIRST_EXTRA], *own[at:], *extra[_FIRST_EXTRA:]],
            namespace={"__doc__": record.__doc__},
            module=record.__module__,
            array_like=config.array_like,
            omit_defaults=config.omit_defaults,
            gc=config.gc,
        )
        return cast("type[_StructT]", more)  # the same record and more fields

    return extended


def _declared(field: msgspec.structs.FieldInfo) -> Any:
    return (field.name, field.type) if field.required else (field.name, field.type, field.default)


def extra_of(record: object) -> dict[str, Any]:
    """Return the fields of EXTRA in a TaskState, or in a record made by `extra_fields`."""
    return dict(zip(EXTRA_NAMES, _extra_values(record), strict=True))


def encode_group(group: GroupMeta) -> bytes:
    """Return the group as Go writes it."""
    created_at = format_time(group.created_at)
    written = _GroupDocument(
        group.group_uuid,
        list(group.task_uuids),
        group.chord_triggered,
        group.lock,
        created_at,
        group.ttl,
        group.plan,
    )
    try:
        return encode(written)
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise explain((), group.group_uuid, "", error) from None


def decode_group(body: bytes) -> GroupMeta:
    """Return the group in these bytes.

    Raises:
        DecodeError: Go would not read it.
    """
    if is_deep(body):
        return _decode_group_leniently(body)
    try:
        read = _decode_group(body)
    except MALFORMED:
        return _decode_group_leniently(body)
    return GroupMeta(
        group_uuid=read.GroupUUID,
        task_uuids=tuple(read.TaskUUIDs or ()),
        chord_triggered=read.ChordTriggered,
        lock=read.Lock,
        created_at=_moment(read.CreatedAt),
        ttl=read.TTL,
        plan=read.Plan,
    )


def _decode_group_leniently(body: bytes) -> GroupMeta:
    fields, _ = read_record(body, GROUP, "group")
    fields.setdefault("group_uuid", "")
    return GroupMeta(**fields)


def encode_results(results: Sequence[Arg]) -> bytes:
    """Return the results alone, as a list like that in a state.

    Raises:
        ArgumentError: a result cannot be sent.
    """
    try:
        return encode(write_results(results, ""))
    except (UnicodeEncodeError, RecursionError, TypeError, OverflowError) as error:
        raise explain(results, "", "result", error) from None


def decode_results(body: bytes) -> tuple[Arg, ...]:
    """Return the results that `encode_results` wrote; none for null.

    Raises:
        DecodeError: it is no list of results.
    """
    try:
        if not is_deep(body, AROUND_RESULTS):
            results = tuple(_decode_results(body))
            if not is_text_needed(results, body):
                return results
    except MALFORMED:
        pass
    try:
        reader = GoJsonReader(body)
        items: Any = read_args(reader, reader.skip_space(0), None)[0]
    except MALFORMED as error:
        raise DecodeError(f"no results: {error}") from None
    return received(items)
