"""Python values under type names on the wire, and back: one table.

    bool string int int8 … int64 uint uint8 … uint64 float32 float64    Go's
    []bool … []float64 []byte                                           Go's; []byte, []uint8: bytes
    json    ours: any JSON value
    py      ours: JSON with tags for datetime, Decimal, set … (values/json_values.py)

Toward Go we refuse what Go would change quietly or crash on; from Go we convert exactly as Go does
(values/go_conversions.py).
"""

from __future__ import annotations

import enum
import functools
import math
import types
import typing
from collections import abc
from collections.abc import Callable
from typing import Any

import msgspec

from machinery_py.errors import ArgumentError
from machinery_py.values.go_conversions import (
    INT64_MAX,
    INT64_MIN,
    NATURAL,
    RANGES,
    READ,
    UINT64_MAX,
    Number,
    read_base64,
    within,
)
from machinery_py.values.json_values import (
    BYTES,
    NeedsTags,
    SecretBytes,
    SecretText,
    base_value,
    int_type,
    pack,
    python_number,
    shown,
    unpack,
    write_bool,
    write_float,
    write_int,
    write_text,
)

__all__ = [
    "Number", "describe", "describe_as", "from_result", "result_of", "to_python", "wanted",
]  # fmt: skip

EXACT: dict[str, type] = {"int64": int, "int": int, "string": str, "float64": float, "bool": bool}


def to_python(type_name: str, value: Any) -> Any:
    """Return the value for a call: converted, wrapped or refused exactly as Go does.

    Raises:
        ArgumentError: with Go's text, which becomes part of the task's error.
    """
    kind = type(value)
    if EXACT.get(type_name) is kind and (kind is not int or INT64_MIN <= value <= INT64_MAX):
        return value
    read = _READ.get(type_name)
    if read is None:
        raise ArgumentError(f"{type_name} is not one of supported types")
    return read(value)


def from_result(type_name: str, value: Any) -> Any:
    """Return a result as `to_python`, or the plain JSON value if that fails (a Go struct)."""
    try:
        return to_python(type_name, value)
    except ArgumentError:
        return value


def describe(value: Any, hint: Any = None, *, secrets: bool = False) -> tuple[str, Any]:
    """Return the type name and the JSON-able value under which a Python value is sent.

    Args:
        hint: the parameter's annotation, which decides for an empty list (`list[int]`), an int for
            a float, and where Go wants another type (`Annotated[int, "int32"]`).
        secrets: whether pydantic's secrets may be sent.

    Raises:
        ArgumentError: it cannot be sent at all, or not as the type that the hint names.
    """
    if hint is not None and hint is not type(value):
        type_name, explicit = wanted(hint)
        if explicit or (type_name and _suits(type_name, value)):
            return type_name, describe_as(type_name, value)
    kind = type(value)
    if kind is list or kind is tuple:
        return _describe_list(value, secrets, hint)
    natural = _DESCRIBE.get(kind)
    return natural(value) if natural is not None else _describe_other(value, hint, secrets)


def describe_as(type_name: str, value: Any) -> Any:
    """Return the JSON-able value for sending under exactly this type, to Go as well.

    Raises:
        ArgumentError: no such type, or the value is not of it; Go would wrap it, fail, or crash.
    """
    write = _WRITE.get(type_name)
    if write is None:
        raise ArgumentError(
            f"cannot send as {type_name!r}: unknown type (known: {', '.join(_WRITE)})"
        )
    return write(value)


def result_of(
    value: Any, hint: Any = None, *, secrets: bool = False
) -> tuple[tuple[str, Any], ...]:
    """Return the results for a returned value.

    That is none for None, one for each item of a tuple, else one.

    Args:
        hint: the annotation of the return value; it decides as a parameter's does (`describe`).

    Raises:
        ArgumentError: something in it cannot be sent.
    """
    if value is None:
        return ()
    if type(value) is tuple:
        return tuple(
            [
                _one_result(item, inner, secrets)
                for item, inner in zip(value, _item_hints(hint, len(value)), strict=True)
            ]
        )
    return (_one_result(value, hint, secrets),)


def _item_hints(hint: Any, count: int) -> abc.Sequence[Any]:
    items = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    if len(items) == 2 and items[1] is ...:
        return [items[0]] * count
    return items if len(items) == count else [None] * count


def _one_result(value: Any, hint: Any, secrets: bool) -> tuple[str, Any]:
    type_name, wire_value = describe(value, hint, secrets=secrets)
    return ("[]uint8" if type_name == "[]byte" else type_name), wire_value


def _describe_int(value: int) -> tuple[str, int]:
    return int_type(value), value


def _describe_list(
    value: list[Any] | tuple[Any, ...], secrets: bool = False, hint: Any = None
) -> tuple[str, Any]:
    kinds = set(map(type, value))
    if len(kinds) == 1:
        [kind] = kinds
        if kind is int:
            if within(value, INT64_MIN, INT64_MAX):
                return "[]int64", list(value)
            if within(value, 0, UINT64_MAX):
                return "[]uint64", list(value)
        elif kind is bool or kind is float or kind is str:
            item_type = "bool" if kind is bool else "float64" if kind is float else "string"
            return f"[]{item_type}", _write_list(item_type, value)
    elif kinds == {int, float} and _suits("[]float64", value):
        return "[]float64", _write_list("float64", value)
    if any(kind.__module__ == "numpy" for kind in kinds):
        plain = list(map(python_number, value))
        if all(one is not other for one, other in zip(plain, value, strict=True)):
            return describe(plain, hint)
    return _describe_other(value, hint, secrets)


def _describe_other(value: Any, hint: Any = None, secrets: bool = False) -> tuple[str, Any]:
    if isinstance(value, enum.Enum):
        return describe(value.value)
    if isinstance(value, (SecretText, SecretBytes)):
        return "py", pack(value, 0, True)
    if (number := python_number(value)) is not value:
        return describe(number, hint)
    for kind in (str, int, float):
        if isinstance(value, kind):  # a subclass
            return describe(base_value(value))
    if isinstance(value, (list, tuple)) and type(value) not in (list, tuple):
        return _describe_list(list(value), secrets, hint)
    if isinstance(value, BYTES):
        return "[]byte", bytes(value)
    try:
        try:
            return "json", pack(value, 0, False, secrets)
        except NeedsTags:
            return "py", pack(value, 0, True, secrets)
    except RecursionError:
        raise ArgumentError(
            f"cannot send {shown(value)}: too little stack is left (recursion in what calls this)"
        ) from None


def _write_list(item_type: str, value: Any) -> list[Any] | None:
    if value is None:
        return None  # a Go slice may be nil
    if not isinstance(value, (list, tuple)):
        raise ArgumentError(f"cannot send {shown(value)} as []{item_type} (a list)")
    kind = NATURAL[item_type]
    if set(map(type, value)) == {kind}:
        if kind is bool or (kind is int and within(value, *RANGES[item_type])):
            return list(value)
        if item_type == "float64" and all(map(math.isfinite, value)):
            return list(value)
    write = _WRITE[item_type]
    return [write(item) for item in value]


def _write_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, BYTES):
        return bytes(value)
    if isinstance(value, str):  # as JSON has them
        return read_base64(value)
    return bytes(_write_list("uint8", value) or ())


def _write_json(value: Any) -> Any:
    try:
        return pack(value, 0, False)
    except NeedsTags:
        raise ArgumentError(
            f"cannot send {shown(value)} as json: it holds what JSON has not"
        ) from None


def _suits(type_name: str, value: Any) -> bool:
    """Return whether the value can be sent under the type of its annotation without loss."""
    if type_name == "float64":
        return type(value) is int and abs(value) <= 2**53
    if not isinstance(value, (list, tuple)):
        return False
    kinds = set(map(type, value))
    if type_name == "[]float64":
        return kinds <= {int, float} and all(
            type(item) is float or abs(item) <= 2**53 for item in value
        )
    kind = NATURAL[type_name[2:]]
    return kinds <= {kind} and (kind is not int or not kinds or within(value, INT64_MIN, INT64_MAX))


def wanted(hint: Any) -> tuple[str, bool]:
    """Return the type name that an annotation asks for (or ""), and whether it is explicit."""
    try:
        return wanted_cached(hint)
    except TypeError:  # not hashable
        return wanted_cached.__wrapped__(hint)


@functools.lru_cache(maxsize=1024)
def wanted_cached(hint: Any) -> tuple[str, bool]:
    if typing.get_origin(hint) is typing.Annotated:
        for note in hint.__metadata__:
            if isinstance(note, str) and note in _WRITE:
                return note, True
        return wanted(hint.__origin__)
    hint = without_none(hint)
    if hint is float:
        return "float64", False
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in LISTS or (origin is tuple and len(items) == 2 and items[1] is ...):
        return {int: "[]int64", float: "[]float64", str: "[]string", bool: "[]bool"}.get(
            items[0], ""
        ), False
    return "", False


LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)


def without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [item for item in typing.get_args(hint) if item is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def _read_json(value: Any) -> Any:
    """Return a copy: changes by the function must not reach retries, hooks and callbacks."""
    if type(value) is not list and type(value) is not dict:
        return value
    try:
        return msgspec.to_builtins(value, enc_hook=float)  # in C; a Number becomes a float
    except RecursionError:
        raise ArgumentError("a json value has too many levels") from None


_READ: dict[str, Callable[[Any], Any]] = {**READ, "json": _read_json, "py": unpack}
_WRITE: dict[str, Callable[[Any], Any]] = {
    "bool": write_bool,
    "string": write_text,
    **{name: functools.partial(write_int, name, low, high) for name, (low, high) in RANGES.items()},
    "float32": functools.partial(write_float, "float32"),
    "float64": functools.partial(write_float, "float64"),
    **{f"[]{name}": functools.partial(_write_list, name) for name in NATURAL},
    "[]byte": _write_bytes,
    "[]uint8": _write_bytes,
    "json": _write_json,
    "py": _write_json,
}
_DESCRIBE: dict[type, Callable[[Any], tuple[str, Any]]] = {
    bool: lambda value: ("bool", value),
    int: _describe_int,
    float: lambda value: ("float64", write_float("float64", value)),
    str: lambda value: ("string", write_text(value)),
    bytes: lambda value: ("[]byte", value),
}
