"""Args and results on the wire, and the encoder for everything: how one value becomes bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from machinery_py.errors import ArgumentError
from machinery_py.tasks.signature import Arg
from machinery_py.values.values import Number, describe_as


class ReceivedArg(
    Arg,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"name": "Name", "type": "Type", "value": "Value"},
):
    """An Arg off the wire. It is handed on as it is, as Go does; an Arg made here is checked when it is encoded."""

    name: str = ""
    type: str = ""
    value: Any = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Arg):
            return NotImplemented
        return (self.type, self.value, self.name) == (other.type, other.value, other.name)

    def __hash__(self) -> int:
        return hash(Arg(type=self.type, value=self.value, name=self.name))


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


encode = msgspec.json.Encoder(enc_hook=_write_number).encode


def received(items: Iterable[tuple[str, str, Any]]) -> tuple[ReceivedArg, ...]:
    """Return what the lenient reader found as Args."""
    return tuple(
        [ReceivedArg(name=name, type=type_name, value=value) for name, type_name, value in items]
    )


def checked_value(arg: Arg) -> Any:
    """The value of an Arg, ready for the encoder.

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


def write_args(args: Sequence[Arg], owner: str, what: str = "argument") -> list[WrittenArg]:
    """Args for the encoder.

    Raises:
        ArgumentError: one cannot be sent; names the owner and the argument.
    """
    written = []
    for arg in args:
        try:
            written.append(WrittenArg(arg.name, arg.type, checked_value(arg)))
        except ArgumentError as error:
            raise _blame(args, arg, owner, what, error) from None
    return written


def write_results(results: Sequence[Arg], owner: str) -> list[WrittenResult]:
    """Results for the encoder, as `write_args`."""
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
            text = (
                "it holds half a surrogate pair"
                if isinstance(cause, UnicodeEncodeError)
                else str(cause)
            )
            return _blame(args, arg, owner, what, ArgumentError(f"cannot send it: {text}"))
    return ArgumentError(f"{owner or '?'!r} cannot be sent: {error}")


_UNSIGNED = ("uint", "uint8", "uint16", "uint32", "uint64")
_UNSIGNED_LISTS = frozenset({"[]byte", *(f"[]{name}" for name in _UNSIGNED)})
_ZERO_HAS_A_SIGN = (
    frozenset({"float64", "float32", "[]float64", "[]float32", *_UNSIGNED}) | _UNSIGNED_LISTS
)
_MINUS_ZERO = re.compile(rb"-0[,\]}\s]")


def is_text_needed(args: Sequence[Arg], body: bytes) -> bool:
    """Whether a number must be read by its text, which msgspec forgets.

    A -0 is a float, and no unsigned number; and of a number where a list of unsigned ones belongs Go takes the characters.
    """
    for arg in args:
        if arg.type in _ZERO_HAS_A_SIGN:
            value = arg.value
            if type(value) is float and arg.type in _UNSIGNED_LISTS:
                return True
            if (type(value) is list or value == 0) and b"-0" in body and _MINUS_ZERO.search(body):
                return True
    return False
