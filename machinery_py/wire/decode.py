"""Bytes to signatures.

There are three ways, each falling back to the next: messages without callbacks exactly as Go and
this library write them; any message with Go's keys; everything else that Go would read
(wire/go_json.py).

The first two differ from Go on purpose, because no program writes such messages: of a repeated key
only the last value counts, where Go merges the items of lists and objects and refuses the message
for an earlier value that is wrong.
Nested signatures stay bytes until they are read: an error in them is found then; Go finds
it at once.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec.json import Decoder

from machinery_py.errors import DecodeError
from machinery_py.tasks.signature import Arg, Lazy, Signature
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.depth import is_deep
from machinery_py.wire.go_json import SIGNATURE, GoJsonReader, read_record
from machinery_py.wire.times import parse_time

MAX_CALLBACKS = 64  # nested chord callbacks; Go has no limit, and two are of no use

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Uint8 = Annotated[int, msgspec.Meta(ge=0, le=255)]


class ReceivedArg(
    Arg,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"name": "Name", "type": "Type", "value": "Value"},
):
    """An Arg that was received. It is passed on unchecked, as Go does."""

    name: str = ""
    type: str = ""
    value: Any = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Arg):
            return NotImplemented
        return (self.type, self.value, self.name) == (other.type, other.value, other.name)

    def __hash__(self) -> int:
        return hash(Arg(type=self.type, value=self.value, name=self.name))


class KnownFields(msgspec.Struct, gc=False):
    """Fields of a message that another program may have written, for listings."""

    UUID: str = ""
    Name: str = ""
    RoutingKey: str = ""
    ETA: str | None = None
    Priority: int = 0

    @property
    def eta(self) -> dt.datetime | None:
        try:
            return None if self.ETA is None else parse_time(self.ETA)
        except DecodeError:
            return None


_decode_known = Decoder(KnownFields).decode


def known_fields(body: bytes) -> KnownFields | None:
    """Return some fields of a message; None if it is no signature or nested too deep."""
    if is_deep(body):
        return None
    try:
        return _decode_known(body)
    except MALFORMED:
        return None


class _Head(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    UUID: str
    Name: str
    RoutingKey: str
    ETA: str | None
    GroupUUID: str
    GroupTaskCount: _Int64
    Args: list[ReceivedArg] | None
    Headers: dict[str, str] | None


class _Step(_Head, gc=False, forbid_unknown_fields=True):
    Priority: _Uint8
    Immutable: bool
    RetryCount: _Int64
    RetryTimeout: _Int64


class _Message(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    UUID: str = ""
    Name: str = ""
    RoutingKey: str = ""
    ETA: str | None = None
    GroupUUID: str = ""
    GroupTaskCount: _Int64 = 0
    Args: list[ReceivedArg] | None = None
    Headers: dict[str, str] | None = None
    Priority: _Uint8 = 0
    Immutable: bool = False
    RetryCount: _Int64 = 0
    RetryTimeout: _Int64 = 0
    OnSuccess: msgspec.Raw = msgspec.Raw(b"null")
    OnError: msgspec.Raw = msgspec.Raw(b"null")
    ChordCallback: msgspec.Raw = msgspec.Raw(b"null")
    BrokerMessageGroupId: str = ""
    SQSReceiptHandle: str = ""
    StopTaskDeletionOnError: bool = False
    IgnoreWhenTaskNotRegistered: bool = False


_decode_head = Decoder(_Head).decode
_decode_step = Decoder(_Step).decode
_decode_message = Decoder(_Message).decode
_decode_items = Decoder(list[msgspec.Raw]).decode

# How a message without options and nested signatures ends. Its only bracket is the last one, so
# these keys are the message's own and not those of a nested signature.
_PLAIN_END = (
    b',"Priority":0,"Immutable":false,"RetryCount":0,"RetryTimeout":0,"OnSuccess":null,"OnError":null,'
    b'"ChordCallback":null,"BrokerMessageGroupId":"","SQSReceiptHandle":"","StopTaskDeletionOnError":false,'
    b'"IgnoreWhenTaskNotRegistered":false}'
)
_PLAIN_LENGTH = len(_PLAIN_END)
_FLAT = 700  # bytes
_MEMBER_END = _PLAIN_END[_PLAIN_END.index(b',"BrokerMessageGroupId"') :]
_MEMBER_START = _PLAIN_END[: -len(b"null" + _MEMBER_END)]
_PRIORITY_TO_TIMEOUT = _PLAIN_END[: _PLAIN_END.index(b',"OnSuccess"')]
_NO_CALLBACKS = _PLAIN_END[_PLAIN_END.index(b',"OnSuccess"') :]


def decode_signature(body: bytes) -> Signature[Any]:
    """Return the signature in a message. Nested ones are decoded (or refused) at first use.

    `null` gives a signature with an empty name, as in Go.

    Raises:
        DecodeError: Go would not read it either.
    """
    # With all the keys that are required here, a value that is too deep is longer than _FLAT bytes.
    if (
        body.endswith(_PLAIN_END)
        and body.startswith(b'{"UUID":"')
        and (len(body) <= _FLAT or not is_deep(body))
    ):
        try:
            head = _decode_head(body[:-_PLAIN_LENGTH] + b"}")
        except MALFORMED:
            pass
        else:
            args = head.Args
            if not (args and is_text_needed(args, body)):
                return Signature(
                    name=head.Name,
                    args=tuple(args) if args else (),
                    uuid=head.UUID,
                    routing_key=head.RoutingKey,
                    eta=None if head.ETA is None else _eta(head.ETA, body),
                    group_uuid=head.GroupUUID,
                    group_task_count=head.GroupTaskCount,
                    headers=head.Headers or {},
                )
    elif body.endswith(_NO_CALLBACKS) and (len(body) <= _FLAT or not is_deep(body)):
        fields = _step_fields(body[: -len(_NO_CALLBACKS)], body)
        if fields is not None:
            return Signature(**fields)
    elif body.endswith(_MEMBER_END) and (member := _decode_member(body)) is not None:
        return member
    return _with_callbacks(body, _decode_one)


def _decode_member(body: bytes) -> Signature[Any] | None:
    """Return a member of a chord without other callbacks, if it is written exactly as we write it.

    A chord may have a hundred thousand of them, each with the same callback.
    """
    start = body.find(_MEMBER_START + b"{")
    callback = body[start + len(_MEMBER_START) : -len(_MEMBER_END)]
    if start < 0 or not callback.endswith(_PLAIN_END) or is_deep(body):
        return None
    fields = _step_fields(body[:start] + _PRIORITY_TO_TIMEOUT, body)
    if fields is None:
        return None
    try:
        return Signature(**fields, chord_callback=_decode_callback(callback))
    except DecodeError:
        return None


@functools.lru_cache(maxsize=16)
def _decode_callback(body: bytes) -> Signature[Any]:
    return decode_signature(body)


def decode_exact(body: bytes) -> Signature[Any]:
    """Return it with each number in Args as a Number, whose text Go quotes in errors."""
    return _with_callbacks(body, lambda raw: _decode_leniently(raw, exact=True))


def _with_callbacks(
    body: bytes, decode: Callable[[bytes], tuple[dict[str, Any], bytes]]
) -> Signature[Any]:
    fields, callback = decode(body)
    if not callback:
        return Signature(**fields)
    levels = [fields]
    while callback:
        if len(levels) > MAX_CALLBACKS:
            raise DecodeError(
                f"no signature: more than {MAX_CALLBACKS} chord callbacks inside of each other"
            )
        fields, callback = decode(callback)
        levels.append(fields)
    signature = Signature[Any](**levels.pop())
    while levels:
        signature = Signature(**levels.pop(), chord_callback=signature)
    return signature


def _decode_one(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the fields of one signature, and the bytes of its ChordCallback."""
    chain = _decode_long_chain(body)
    if chain is not None:
        return chain
    if is_deep(body):
        return _decode_leniently(body)
    try:
        message = _decode_message(body)
    except MALFORMED:
        return _decode_leniently(body)
    success, error, callback = (
        bytes(message.OnSuccess),
        bytes(message.OnError),
        bytes(message.ChordCallback),
    )
    args = message.Args
    if (
        not (success[:1] in b"[n" and error[:1] in b"[n" and callback[:1] in b"{n")
        or _repeats_headers(body, success, error, callback)
        or (args and is_text_needed(args, body))
        or _is_minus_zero(message.Priority, body)
    ):
        return _decode_leniently(body)
    fields = _fields_of(message, body)
    fields |= {
        "on_success": _lazy(success),
        "on_error": _lazy(error),
        "broker_message_group_id": message.BrokerMessageGroupId,
        "sqs_receipt_handle": message.SQSReceiptHandle,
        "stop_task_deletion_on_error": message.StopTaskDeletionOnError,
        "ignore_when_task_not_registered": message.IgnoreWhenTaskNotRegistered,
    }
    return fields, b"" if callback == b"null" else callback


_MINUS_PRIORITY = re.compile(rb'"Priority"\s*:\s*-0')

_CHAIN_END = _PLAIN_END[_PLAIN_END.index(b',"OnError"') :]  # how a step of a chain ends
_CHAIN_START = b',"OnSuccess":'
_LONG = 16_384  # bytes; a chain that may be too deep for a decoder is longer
# Between two signatures of one list; inside a string its quotes would be escaped.
_NEXT_SIGNATURE = b'},{"UUID":'


def _decode_long_chain(body: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Return one step of a long chain, if it is written exactly as Go and this library write it.

    All other keys are in their places before and behind, so what is left in the middle is OnSuccess
    alone.
    """
    if len(body) < _LONG or not body.endswith(b"]" + _CHAIN_END):
        return None
    start = body.find(_CHAIN_START + b"[")
    if start < 0 or is_deep(body[:start]):
        return None
    fields = _step_fields(body[:start], body)
    if fields is None:
        return None
    fields["on_success"] = Lazy(body[start + len(_CHAIN_START) : -len(_CHAIN_END)], decode_list)
    return fields, b""


def _decode_leniently(body: bytes, *, exact: bool = False) -> tuple[dict[str, Any], bytes]:
    fields, extra = read_record(body, SIGNATURE, "signature", exact=exact)
    fields["name"] = fields.get("name", "")
    if extra:
        fields["extra"] = extra
    if "args" in fields:
        fields["args"] = received(fields["args"])
    for name in ("on_success", "on_error"):
        if name in fields:
            fields[name] = _lazy(fields[name])
    callback: bytes = fields.pop("chord_callback", b"")
    return fields, callback


def _step_fields(head: bytes, body: bytes) -> dict[str, Any] | None:
    """Return the fields before the callbacks; None if only the lenient reader gets them right."""
    try:
        step = _decode_step(head + b"}")
    except MALFORMED:
        return None
    if (
        (step.Args and is_text_needed(step.Args, head))
        or _repeats_headers(head)
        or _is_minus_zero(step.Priority, head)
    ):
        return None
    return _fields_of(step, body)


def _fields_of(message: _Step | _Message, body: bytes) -> dict[str, Any]:
    return {
        "name": message.Name,
        "args": tuple(message.Args) if message.Args else (),
        "uuid": message.UUID,
        "routing_key": message.RoutingKey,
        "eta": None if message.ETA is None else _eta(message.ETA, body),
        "group_uuid": message.GroupUUID,
        "group_task_count": message.GroupTaskCount,
        "headers": message.Headers or {},
        "priority": message.Priority,
        "immutable": message.Immutable,
        "retry_count": message.RetryCount,
        "retry_timeout": message.RetryTimeout,
    }


def _lazy(raw: bytes) -> Sequence[Signature[Any]]:
    return () if raw in (b"", b"null", b"[]") else Lazy(raw, decode_list)


def decode_list(raw: bytes) -> tuple[Signature[Any], ...]:
    """Return the signatures in a JSON list, without nulls (which kill a Go worker).

    Raises:
        DecodeError: one of them is none.
    """
    # The rest of a long chain: one signature, with one in its list, with one in its list …
    if (
        len(raw) > _LONG
        and _NEXT_SIGNATURE not in raw
        and raw.startswith(b"[{")
        and raw.endswith(b"}]")
    ):
        step = _decode_long_chain(raw[1:-1])
        if step is not None:
            return (Signature(**step[0]),)
    try:
        items = [bytes(item) for item in _decode_items(raw)] if not is_deep(raw) else _items(raw)
    except MALFORMED:
        items = _items(raw)
    return tuple([decode_signature(item) for item in items if item != b"null"])


def _items(raw: bytes) -> list[bytes]:
    items: list[bytes] = []
    reader = GoJsonReader(raw)

    def item(at: int) -> int:
        piece, end = reader.raw(at)
        items.append(piece)
        return end

    reader.array(reader.skip_space(0), item)
    return items


def _eta(text: str, body: bytes) -> dt.datetime:
    if text.encode() not in body:
        # Go does not resolve them.
        raise DecodeError(f"no signature: ETA {text!r} is written with escapes")
    try:
        return parse_time(text)
    except DecodeError as error:
        raise DecodeError(f"no signature: ETA {error}") from None


def _is_minus_zero(priority: int, body: bytes) -> bool:
    """Return whether the priority may be written -0, which Go refuses."""
    return priority == 0 and b"-0" in body and _MINUS_PRIORITY.search(body) is not None


def _repeats_headers(body: bytes, *nested: bytes) -> bool:
    """Return whether the key Headers may be there twice; Go merges the two."""
    count = body.count(b'"Headers"')
    return count > 1 and count - sum(raw.count(b'"Headers"') for raw in nested) > 1


# Arguments and results


def received(items: Iterable[tuple[str, str, Any]]) -> tuple[ReceivedArg, ...]:
    """Return what the lenient reader found as Args."""
    return tuple(
        [ReceivedArg(name=name, type=type_name, value=value) for name, type_name, value in items]
    )


_UNSIGNED = ("uint", "uint8", "uint16", "uint32", "uint64")
_UNSIGNED_LISTS = frozenset({"[]byte", *(f"[]{name}" for name in _UNSIGNED)})
_ZERO_HAS_A_SIGN = (
    frozenset({"float64", "float32", "[]float64", "[]float32", *_UNSIGNED}) | _UNSIGNED_LISTS
)
_MINUS_ZERO = re.compile(rb"-0[,\]}\s]")


def is_text_needed(args: Sequence[Arg], body: bytes) -> bool:
    """Return whether a number must be read from its text, which msgspec drops.

    A -0 is a float and no unsigned number. Where a list of unsigned numbers is expected, Go takes
    the characters of a number.
    """
    for arg in args:
        if arg.type in _ZERO_HAS_A_SIGN:
            value = arg.value
            if type(value) is float and arg.type in _UNSIGNED_LISTS:
                return True
            if (type(value) is list or value == 0) and b"-0" in body and _MINUS_ZERO.search(body):
                return True
    return False
