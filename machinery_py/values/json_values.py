"""Values inside of values: the types `json` and `py`, and the checks that every sent value passes.

`json` is plain JSON. `py` is JSON in which {"$": kind, "v": value} stands for what JSON lacks:
bytes, datetime, date, timedelta, decimal, uuid, set, frozenset, failure, chunk, and dict (with
keys that are no strings, or with a key "$" of its own).
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import itertools
import math
import reprlib
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from machinery_py.errors import ArgumentError
from machinery_py.values.go_conversions import INT64_MAX, INT64_MIN, UINT64_MAX, read_base64, single

MAX_DEPTH = 200  # levels of JSON in a value; far below the recursion limit of any Python


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A task that failed, as a value: in place of its result, or `current_task().failed`.

    Attributes:
        task: its name, as far as it is known.
        error, error_type: as in its TaskState.
    """

    task: str
    uuid: str
    error: str
    error_type: str = ""


class Chunk(list[Any]):
    """Results of the calls of one chunk, see `Task.chunks`."""


class NeedsTags(Exception):
    """Raised when a value cannot be written as plain JSON."""


def shown(value: Any) -> str:
    if isinstance(value, dict):
        value = dict(itertools.islice(value.items(), 8))  # reprlib sorts all, and shows some
    simple = isinstance(value, (str, int, float, bytes, list, tuple, dict, type(None)))
    return reprlib.repr(value) if simple else f"<{type(value).__name__}>"  # never an address


def refused(value: Any) -> ArgumentError:
    return ArgumentError(f"cannot send {shown(value)} (send an id and load it in the task)")


def base_value(value: Any) -> Any:
    """Return the plain str, int or float in an instance of a subclass, whatever it overrides."""
    if isinstance(value, str):
        return str.__str__(value)
    return int.__index__(value) if isinstance(value, int) else float.__float__(value)


def int_type(value: int) -> str:
    """Return `int64`, or `uint64` for a greater integer.

    Raises:
        ArgumentError: it needs more than 64 bits.
    """
    if INT64_MIN <= value <= INT64_MAX:
        return "int64"
    if 0 <= value <= UINT64_MAX:
        return "uint64"
    raise ArgumentError(
        f"cannot send {_digits(value)}: it has more than 64 bits (send it as a string)"
    )


def _digits(value: int) -> str:
    return str(value) if value.bit_length() < 200 else f"an integer of {value.bit_length()} bits"


def write_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"cannot send {shown(value)} as string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ArgumentError(
                f"cannot send {shown(value)}: it holds half a surrogate pair"
            ) from None
    return value if type(value) is str else str.__str__(value)


def write_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ArgumentError(f"cannot send {shown(value)} as bool")
    return value


def write_int(type_name: str, low: int, high: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"cannot send {shown(value)} as {type_name}")
    if not low <= value <= high:
        raise ArgumentError(f"cannot send {_digits(value)} as {type_name} ({low} to {high})")
    return value if type(value) is int else int.__index__(value)


def write_float(type_name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"cannot send {shown(value)} as {type_name}")
    if isinstance(value, int) and abs(value) > 2**53:
        raise ArgumentError(f"cannot send {shown(value)} as {type_name}: it would lose digits")
    number = float(value)
    if not math.isfinite(number) or (type_name == "float32" and math.isinf(single(number))):
        raise ArgumentError(
            f"cannot send {number} as {type_name} (JSON has no nan and no infinity)"
        )
    return number


BYTES = (bytes, bytearray, memoryview)
_KEPT = (
    bytes,
    bytearray,
    dt.datetime,
    dt.date,
    dt.timedelta,
    decimal.Decimal,
    uuid.UUID,
    Failure,
)  # tagged by us


def pack(value: Any, depth: int, tags: bool) -> Any:
    """Return the value as JSON, with tags for the types that JSON lacks.

    Args:
        depth: levels of JSON that are around it.

    Raises:
        NeedsTags: tags are not allowed, but needed.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return write_text(value)
    if kind is int:
        int_type(value)
        return value
    if kind is float:
        return write_float("float64", value)
    _check_depth(depth + 1)
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not (tags and "$" in value):
            return {write_text(key): pack(item, depth + 1, tags) for key, item in value.items()}
        _check_depth(depth + 3)
        pairs = value.items() if tags else ()
        return _tagged(
            "dict",
            [[_pack_key(key, depth + 3), pack(item, depth + 3, True)] for key, item in pairs],
            tags,
        )
    if isinstance(value, Chunk):
        return _tagged(
            "chunk", [pack(item, depth + 2, True) for item in value] if tags else [], tags
        )
    if isinstance(value, (list, tuple)):
        return [pack(item, depth + 1, tags) for item in value]
    if isinstance(value, enum.Enum):
        return pack(value.value, depth + 1, tags)
    if isinstance(value, (str, int, float)):
        return pack(base_value(value), depth + 1, tags)
    if isinstance(value, (set, frozenset)):
        _check_depth(depth + 2)
        name = "set" if isinstance(value, set) else "frozenset"
        return _tagged(name, [_pack_key(item, depth + 2) for item in value] if tags else [], tags)
    for classes, name, write in _TAGS:
        if isinstance(value, classes):
            _check_depth(depth + 2)
            return _tagged(name, write(value), tags)
    return pack(_model(value), depth + 1, tags)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ArgumentError(
            f"cannot send a value of more than {MAX_DEPTH} levels, or one that contains itself"
        )


def _pack_key(value: Any, depth: int) -> Any:
    """Pack a dict key or set item, and refuse one that would not be hashable when it is read."""
    packed = pack(value, depth, True)
    if type(packed) is list or (type(packed) is dict and packed.get("$") in (None, "set", "dict")):
        raise ArgumentError(
            f"cannot send {shown(value)} as a key of a dict or an item of a set: "
            f"it would come back as a {'list' if type(packed) is list else 'dict or set'} "
            "(send a list of pairs)"
        )
    return packed


def _tagged(name: str, value: Any, tags: bool) -> dict[str, Any]:
    if not tags:
        raise NeedsTags
    return {"$": name, "v": value}


def _model(value: Any) -> Any:
    """Return a dataclass, Struct or pydantic model as a dict.

    The receiver rebuilds it by its annotation.
    """
    if isinstance(value, type):
        raise refused(value)
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump(mode="json")
    if not (dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct)):
        raise refused(value)
    try:
        return msgspec.to_builtins(value, builtin_types=_KEPT, enc_hook=_model)
    except RecursionError:
        raise ArgumentError(f"cannot send {shown(value)}: it contains itself") from None


def _write_moment(value: dt.datetime) -> str:
    if value.utcoffset() is None:
        raise ArgumentError(
            f"cannot send {value!r}: it has no time zone (use datetime.now(timezone.utc))"
        )
    return value.isoformat()


# datetime before date, of which it is a kind.
_TAGS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (BYTES, "bytes", lambda value: base64.b64encode(value).decode()),
    (dt.datetime, "datetime", _write_moment),
    (dt.date, "date", dt.date.isoformat),
    (dt.timedelta, "timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    (decimal.Decimal, "decimal", str),
    (uuid.UUID, "uuid", str),
    (Failure, "failure", msgspec.structs.asdict),
)
_UNTAG: dict[str, Callable[[Any], Any]] = {
    "bytes": read_base64,
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "timedelta": lambda parts: dt.timedelta(*parts),
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "failure": lambda fields: msgspec.convert(fields, Failure),
    "chunk": Chunk,
}


def unpack(value: Any, depth: int = 0) -> Any:
    """Undo `pack`: resolve its tags."""
    if depth > MAX_DEPTH:
        raise ArgumentError(f"a py value has more than {MAX_DEPTH} levels")
    if type(value) is list:
        return [unpack(item, depth + 1) for item in value]
    if type(value) is not dict:
        return value
    if "$" not in value:
        return {key: unpack(item, depth + 1) for key, item in value.items()}
    name = value["$"]
    try:
        return _UNTAG[name](unpack(value.get("v"), depth + 1))
    except ArgumentError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise ArgumentError(
            f"a py value holds {shown(value)}, which is no {shown(name)} (a newer sender?)"
        ) from None
