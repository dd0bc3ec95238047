"""Values inside of values: the types `json` and `py`, and the checks that every sent value passes.

`json` is plain JSON. `py` is JSON in which {"$": kind, "v": value} stands for what JSON lacks:
bytes, datetime, date, time, timedelta, decimal, uuid, path, posixpath, windowspath, address,
interface, network, deque, set, frozenset, secret, failure, chunk, and dict (with keys that are no
strings, or with a key "$" of its own).
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import enum
import ipaddress
import itertools
import math
import pathlib
import reprlib
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from machinery_py.errors import ArgumentError
from machinery_py.values.go_conversions import INT64_MAX, INT64_MIN, UINT64_MAX, read_base64, single
from machinery_py.values.pydantic_types import forms, is_pydantic, read
from machinery_py.values.records import is_record, written
from machinery_py.values.unchanged import unchanged

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


class SecretText(str):
    """Text of a secret, which does not show it in a repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"


class SecretBytes(bytes):
    """Bytes of a secret, which do not show it in a repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "b'**********'"


class NeedsTags(Exception):
    """Raised when a value cannot be written as plain JSON."""


def shown(value: Any) -> str:
    if isinstance(value, dict):
        value = dict(itertools.islice(value.items(), 8))  # reprlib sorts all, and shows some
    simple = isinstance(value, (str, int, float, bytes, list, tuple, dict, type(None)))
    return reprlib.repr(value) if simple else f"<{type(value).__name__}>"  # never an address


def refused(value: Any) -> ArgumentError:
    is_array = bool(getattr(value, "ndim", 0)) and hasattr(value, "tolist")
    advice = "use its tolist()" if is_array else "send an id and load it in the task"
    return ArgumentError(f"cannot send {shown(value)} ({advice})")


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


def pack(value: Any, depth: int, tags: bool, secrets: bool = False) -> Any:
    """Return the value as JSON, with tags for the types that JSON lacks.

    Args:
        depth: levels of JSON that are around it.
        secrets: pydantic's secrets travel as they are, and not only those that came like this.

    Raises:
        NeedsTags: tags are not allowed, but needed.
    """
    kind: Any = type(value)
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
            return {
                write_text(key): pack(item, depth + 1, tags, secrets) for key, item in value.items()
            }
        _check_depth(depth + 3)
        pairs = value.items() if tags else ()
        return _tagged(
            "dict",
            [
                [_pack_key(key, depth + 3), pack(item, depth + 3, True, secrets)]
                for key, item in pairs
            ],
            tags,
        )
    if isinstance(value, (Chunk, deque)):
        items = [pack(item, depth + 2, True, secrets) for item in value] if tags else []
        if isinstance(value, Chunk):
            return _tagged("chunk", items, tags)
        return _tagged("deque", [items, value.maxlen], tags)
    if isinstance(value, (list, tuple)):
        return [pack(item, depth + 1, tags, secrets) for item in value]
    if is_record(kind) and kind is not Failure and not is_pydantic(kind):
        return _pack_record(value, depth, tags, secrets)
    if isinstance(value, enum.Enum):
        return pack(value.value, depth + 1, tags, secrets)
    if isinstance(value, (SecretText, SecretBytes)):
        plain = str.__str__(value) if isinstance(value, str) else bytes(value)
        return _tagged("secret", pack(plain, depth + 2, True) if tags else None, tags)
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
    if callable(getattr(value, "get_secret_value", None)):
        return pack(_revealed(value, secrets), depth, tags)
    if is_pydantic(kind):
        return _pack_pydantic(value, depth, tags, secrets)
    number = python_number(value)
    if number is value:
        raise refused(value)
    return pack(number, depth, tags)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ArgumentError(
            f"cannot send a value of more than {MAX_DEPTH} levels, or one that contains itself"
        )


def _pack_key(value: Any, depth: int) -> Any:
    """Pack a dict key or set item, and refuse one that would not be hashable when it is read."""
    packed = pack(value, depth, True)
    if type(packed) is list or (
        type(packed) is dict and packed.get("$") in (None, "set", "dict", "deque")
    ):
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


class SecretRefused(ArgumentError):
    """A secret is to be sent, and its task does not say that it may."""


def _revealed(value: Any, allowed: bool) -> SecretText | SecretBytes:
    if not allowed:
        raise SecretRefused(
            f"cannot send {shown(value)}: it is a secret, and would travel in clear text "
            "(send its name, or let it: @server.task(send_secrets=True))"
        )
    secret = value.get_secret_value()
    if isinstance(secret, str):
        return SecretText(secret)
    if isinstance(secret, bytes):
        return SecretBytes(secret)
    raise ArgumentError(f"cannot send {shown(value)}: its secret is no text and no bytes")


def _pack_record(value: Any, depth: int, tags: bool, secrets: bool) -> Any:
    try:
        found = written(value)
    except AttributeError as error:
        raise ArgumentError(f"cannot send {shown(value)}: {error}") from None
    if isinstance(found, list) or "$" in found:
        return pack(found, depth, tags, secrets)
    return {name: pack(item, depth + 1, tags, secrets) for name, item in found.items()}


def _pack_pydantic(value: Any, depth: int, tags: bool, secrets: bool) -> Any:
    """Return the first form of the value of which an equal one can be made."""
    kind, why = type(value), None
    for form in forms(value):
        try:
            packed = pack(form, depth, tags, secrets)
            again = read(kind, unpack(packed) if tags else packed)
        except (NeedsTags, SecretRefused):
            raise
        except ArgumentError as error:
            why = why or error
        except Exception:  # pydantic's, and user code: it does not take what it has given
            continue
        else:
            if unchanged(value, again, within=True):
                return packed
    raise why or ArgumentError(
        f"cannot send {shown(value)}: {kind.__name__} does not make an equal one of its own JSON"
    )


def python_number(value: Any) -> Any:
    """Return a number of numpy as Python's, if that has it exactly; else the value."""
    kind = type(value)
    if kind.__module__ != "numpy" or kind.__name__ == "ndarray" or not hasattr(value, "dtype"):
        return value
    number = value.item() if value.dtype.kind in "biuf" else value
    return number if type(number) in (bool, int, float) else value


def _write_moment(value: dt.datetime) -> str:
    if value.utcoffset() is None:
        raise ArgumentError(
            f"cannot send {value!r}: it has no time zone (use datetime.now(timezone.utc))"
        )
    return value.isoformat()


def _write_time(value: dt.time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise ArgumentError(f"cannot send {value!r}: its zone has no offset without a date")
    return value.isoformat()


# A class before those of which it is a kind.
_TAGS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (BYTES, "bytes", lambda value: base64.b64encode(value).decode()),
    (dt.datetime, "datetime", _write_moment),
    (dt.date, "date", dt.date.isoformat),
    (dt.time, "time", _write_time),
    (dt.timedelta, "timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    (decimal.Decimal, "decimal", str),
    (uuid.UUID, "uuid", str),
    (pathlib.Path, "path", lambda value: write_text(str(value))),
    (pathlib.PurePosixPath, "posixpath", lambda value: write_text(str(value))),
    (pathlib.PureWindowsPath, "windowspath", lambda value: write_text(str(value))),
    ((ipaddress.IPv4Interface, ipaddress.IPv6Interface), "interface", str),
    ((ipaddress.IPv4Address, ipaddress.IPv6Address), "address", str),
    ((ipaddress.IPv4Network, ipaddress.IPv6Network), "network", str),
    (Failure, "failure", msgspec.structs.asdict),
)
_UNTAG: dict[str, Callable[[Any], Any]] = {
    "bytes": read_base64,
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "timedelta": lambda parts: dt.timedelta(*parts),
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "path": pathlib.Path,
    "posixpath": pathlib.PurePosixPath,
    "windowspath": pathlib.PureWindowsPath,
    "interface": ipaddress.ip_interface,
    "address": ipaddress.ip_address,
    "network": ipaddress.ip_network,
    "deque": lambda parts: deque(*parts),
    "secret": lambda value: SecretText(value) if isinstance(value, str) else SecretBytes(value),
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
