"""Signatures, arguments, results and moments to bytes, as Go Machinery writes them.

Reading is in wire/decode.py, and in wire/go_json.py where only Go's laxness allows it. States and
groups are in wire/states.py.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.json import Decoder

from machinery_py.errors import ArgumentError, DecodeError
from machinery_py.tasks.signature import Arg, Checked, Lazy, Signature
from machinery_py.values.malformed import MALFORMED
from machinery_py.values.values import Number, describe_as
from machinery_py.wire.decode import ReceivedArg, decode_exact, decode_list, decode_signature
from machinery_py.wire.depth import MAX_LEVELS, is_deep, levels
from machinery_py.wire.go_json import SIGNATURE, fold
from machinery_py.wire.times import FIRST_MOMENT, LAST_MOMENT

__all__ = [
    "LastEncoded",
    "decode_exact",
    "decode_list",
    "decode_signature",
    "encode_signature",
    "format_time",
]

_INT64 = range(-(2**63), 2**63)
_SMALL = 2**31  # what needs no closer look
_LONG = 4000  # nested signatures from which the limit of levels is checked


class WrittenArg(msgspec.Struct, gc=False):
    Name: str
    Type: str
    Value: Any


class WrittenResult(msgspec.Struct, gc=False):
    Type: str
    Value: Any


def _write_number(value: Any) -> Any:
    if isinstance(value, Number):
        return msgspec.Raw(value.token.encode())
    raise TypeError(f"no JSON: <{type(value).__name__}>")


encode: Final = msgspec.json.Encoder(enc_hook=_write_number).encode


class _Written(msgspec.Struct, gc=False):
    """A message for the encoder; nested signatures are inserted afterwards."""

    UUID: str
    Name: str
    RoutingKey: str
    ETA: str | None
    GroupUUID: str
    GroupTaskCount: int
    Args: list[WrittenArg] | None
    Headers: Mapping[str, Any]
    Priority: int
    Immutable: bool
    RetryCount: int
    RetryTimeout: int
    OnSuccess: None
    OnError: None
    ChordCallback: None
    BrokerMessageGroupId: str
    SQSReceiptHandle: str
    StopTaskDeletionOnError: bool
    IgnoreWhenTaskNotRegistered: bool


# Where nested signatures go. Inside of a string its quotes would be escaped.
_NESTED = b'"OnSuccess":null,"OnError":null,"ChordCallback":null'
_BEHIND = b',"BrokerMessageGroupId":'


def encode_signature(signature: Signature[Any]) -> bytes:
    """Return the message as Go would write it: all keys, in Go's order.

    Nested signatures that came off the wire are copied as bytes, however many there are.

    Raises:
        ArgumentError: an argument cannot be sent, or Go cannot read a field; names the task and
            the argument.
    """
    callback = signature.chord_callback
    if _has_callbacks(signature):
        return _encode_nested(signature)
    if callback is None:
        return _encode_one(signature)
    if callback.chord_callback is not None or _has_callbacks(callback):
        return _encode_nested(signature)
    # A chord may have a hundred thousand such members.
    before, _, after = _encode_one(signature).rpartition(b"null" + _BEHIND)
    return b"".join((before, _encode_one(callback), _BEHIND, after))


class LastEncoded:
    """Encodes signatures with other headers, and remembers the last one.

    The members of a chord arrive with the same callback. May be called from any thread.
    """

    def __init__(self) -> None:
        self._last: tuple[Signature[Any], Mapping[str, Any], bytes] | None = None

    def __call__(self, signature: Signature[Any], headers: Mapping[str, Any]) -> bytes:
        """Return the message. Raises as `encode_signature`."""
        last = self._last
        if last is not None and last[0] is signature and last[1] == headers:
            return last[2]
        body = encode_signature(signature.replace(headers=headers))
        self._last = signature, headers, body
        return body


def _has_callbacks(signature: Signature[Any]) -> bool:
    success, error = signature.on_success, signature.on_error
    # A Lazy would decode all of its bytes to say whether it is true.
    return bool(type(success) is Lazy or success or type(error) is Lazy or error)


def _encode_one(signature: Signature[Any]) -> bytes:
    name, args, headers, eta = signature.name, signature.args, signature.headers, signature.eta
    if headers:
        headers = _checked_headers(signature)
    priority, count, retries, timeout = (
        signature.priority,
        signature.group_task_count,
        signature.retry_count,
        signature.retry_timeout,
    )
    if not (
        type(priority) is type(count) is type(retries) is type(timeout) is int
        and 0 <= priority <= 255
    ) or not (
        -_SMALL < count < _SMALL and -_SMALL < retries < _SMALL and -_SMALL < timeout < _SMALL
    ):
        _check_integers(signature)
    written = _Written(
        signature.uuid,
        name,
        signature.routing_key,
        None if eta is None else _write_eta(signature),
        signature.group_uuid,
        count,
        write_args(args, name) if args else None,
        headers,
        priority,
        signature.immutable,
        retries,
        timeout,
        None,
        None,
        None,
        signature.broker_message_group_id,
        signature.sqs_receipt_handle,
        signature.stop_task_deletion_on_error,
        signature.ignore_when_task_not_registered,
    )
    try:
        body = encode(written)
    except (UnicodeEncodeError, RecursionError, TypeError, OverflowError) as error:
        raise explain(args, name, "argument", error) from None
    return body if not signature.extra else _with_extra(body, signature)


def _encode_nested(signature: Signature[Any]) -> bytes:
    """Encode without recursion: the steps of a chain are nested, up to 5,000 levels."""
    pieces: list[bytes] = []
    deepest = 0
    todo: list[tuple[bytes | Signature[Any], int]] = [(signature, 1)]  # the last one is next
    while todo:
        piece, level = todo.pop()
        if isinstance(piece, bytes):
            pieces.append(piece)
            continue
        deepest = max(deepest, level)
        before, _, after = _encode_one(piece).rpartition(_NESTED)
        pieces.append(before)
        callback = piece.chord_callback
        todo.append((after, 0))
        todo.append((b"null" if callback is None else callback, level + 1))
        todo.append((b',"ChordCallback":', 0))
        _push_list(todo, piece.on_error, level + 1)
        todo.append((b',"OnError":', 0))
        _push_list(todo, piece.on_success, level + 1)
        todo.append((b'"OnSuccess":', 0))
    body = b"".join(pieces)
    if deepest > _LONG and levels(body) > MAX_LEVELS:
        raise ArgumentError(
            f"{signature.name} holds {deepest} signatures inside of each other (Go reads 4999)"
        )
    return body


def _push_list(
    todo: list[tuple[bytes | Signature[Any], int]], nested: Sequence[Signature[Any]], level: int
) -> None:
    if isinstance(nested, Lazy):
        items = _without_nulls(nested)
        if items is None:
            todo.append((nested.raw, 0))
            return
        nested = items
    if not nested:
        todo.append((b"null", 0))
        return
    todo.append((b"]", 0))
    for index in range(len(nested) - 1, -1, -1):
        todo.append((nested[index], level))
        todo.append((b"," if index else b"[", 0))


class _Nested(msgspec.Struct, gc=False):
    OnSuccess: list[_Nested] | None = None
    OnError: list[_Nested] | None = None


_read_nested = Decoder(list[_Nested]).decode
_NULL = re.compile(rb'null(?<!":null)')


def _without_nulls(nested: Lazy) -> Sequence[Signature[Any]] | None:
    """Return the signatures if a null is among them, which kills a Go worker; else None."""
    if not _NULL.search(nested.raw) or is_deep(nested.raw):
        return None  # too deep to be sure; Go hands it on as well
    try:
        _read_nested(nested.raw)
    except MALFORMED:
        try:
            return tuple(nested)
        except DecodeError:
            return None  # Go will not read it either
    return None


def _write_eta(signature: Signature[Any]) -> str:
    try:
        return format_time(signature.eta or dt.datetime.min)
    except ArgumentError as error:
        raise ArgumentError(f"{signature.name} eta: {error}") from None


def _checked_headers(signature: Signature[Any]) -> Mapping[str, Any]:
    headers = signature.headers
    for key, value in headers.items():
        # Raw is what came off the wire and is no string.
        if type(key) is not str or not isinstance(value, (str, msgspec.Raw)):
            found = f"{signature.name} header {key!r}: {type(value).__name__}"
            raise ArgumentError(f"{found} is no string (Go workers refuse others on AMQP)")
    return headers if len(headers) < 2 else {key: headers[key] for key in sorted(headers)}


def _check_integers(signature: Signature[Any]) -> None:
    for name, allowed in (
        ("priority", range(256)),
        ("group_task_count", _INT64),
        ("retry_count", _INT64),
        ("retry_timeout", _INT64),
    ):
        value = getattr(signature, name)
        if type(value) is not int or value not in allowed:
            wanted = f"an integer from {allowed.start} to {allowed.stop - 1}"
            raise ArgumentError(f"{signature.name} {name}: {value!r} ({wanted})")


def _with_extra(body: bytes, signature: Signature[Any]) -> bytes:
    taken = [key for key in signature.extra if fold(key) in SIGNATURE]
    if taken:
        raise ArgumentError(f"{signature.name} extra: {taken[0]!r} is a key of Go's own")
    return body[:-1] + b"," + encode(signature.extra)[1:]


# Arguments, results and moments


def checked_value(arg: Arg) -> Any:
    """Return the value of an Arg, ready for the encoder.

    Raises:
        ArgumentError: it is not of its type, or no value of any type.
    """
    value, kind = arg.value, type(arg.value)
    if kind is int:
        if arg.type == "int64" and -0x8000_0000_0000_0000 <= value <= 0x7FFF_FFFF_FFFF_FFFF:
            return value
    elif kind is str:
        if arg.type == "string":
            return value  # the encoder refuses half a surrogate pair
    elif kind is float and arg.type == "float64" and math.isfinite(value):
        return value
    if type(arg) is ReceivedArg:
        return value
    return describe_as(arg.type, value)


def write_args(args: Sequence[Arg], owner: str) -> list[WrittenArg]:
    """Return the args as records for the encoder.

    Raises:
        ArgumentError: one cannot be sent; names the owner and the argument.
    """
    if type(args) is Checked:  # they were made of values that can be sent
        return [WrittenArg(arg.name, arg.type, arg.value) for arg in args]
    written = []
    for arg in args:
        try:
            written.append(WrittenArg(arg.name, arg.type, checked_value(arg)))
        except ArgumentError as error:
            raise _blame(args, arg, owner, "argument", error) from None
    return written


def write_results(results: Sequence[Arg], owner: str) -> list[WrittenResult]:
    """Return the results as records for the encoder. Raises as `write_args`."""
    written = []
    for result in results:
        try:
            written.append(WrittenResult(result.type, checked_value(result)))
        except ArgumentError as error:
            raise _blame(results, result, owner, "result", error) from None
    return written


def _blame(args: Sequence[Arg], arg: Arg, owner: str, what: str, error: Exception) -> ArgumentError:
    index = next(index for index, other in enumerate(args) if other is arg)
    return ArgumentError(
        f"{owner or '?'} {what} {arg.name!r}: {error}"
        if arg.name
        else f"{owner or '?'} {what} {index + 1}: {error}"
    )


def explain(args: Sequence[Arg], owner: str, what: str, error: Exception) -> ArgumentError:
    """Return an error that names the Arg that made the encoder fail."""
    for arg in args:
        try:
            encode(arg.value)
            encode([arg.type, arg.name])
        except (UnicodeEncodeError, RecursionError, TypeError, OverflowError, ValueError) as cause:
            is_half = isinstance(cause, UnicodeEncodeError)
            text = "it holds half a surrogate pair" if is_half else str(cause)
            return _blame(args, arg, owner, what, ArgumentError(f"cannot send it: {text}"))
    return ArgumentError(f"{owner or '?'!r} cannot be sent: {error}")


def format_time(moment: dt.datetime) -> str:
    """Return the moment in UTC, with as many digits as it needs: `2026-01-02T03:04:05.12Z`.

    Raises:
        ArgumentError: it has no time zone.
    """
    if moment.tzinfo is not dt.UTC:
        offset = moment.utcoffset()
        if offset is None:
            raise ArgumentError(f"{moment!r} has no time zone (use datetime.now(timezone.utc))")
        try:
            moment = moment.replace(tzinfo=dt.UTC) - offset
        except OverflowError:
            moment = FIRST_MOMENT if offset > dt.timedelta(0) else LAST_MOMENT
    text = encode(moment)[1:-2].decode()  # as isoformat(), in a third of its time
    return (text.rstrip("0") if moment.microsecond else text) + "Z"
