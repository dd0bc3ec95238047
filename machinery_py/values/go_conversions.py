"""Go's conversions of a received JSON value to its types, with its wraparounds and error texts.

They follow Go Machinery's `reflect.go`.

bool string int int8 … int64 uint uint8 … uint64 float32 float64
[]bool … []float64, and []byte, which is []uint8; both are bytes in Python
"""

from __future__ import annotations

import base64
import binascii
import functools
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

from machinery_py.errors import ArgumentError

MAX_QUOTE = 1000  # characters of a wrong value that an error text shows

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
RANGES = {f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)}
RANGES |= {f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)}
RANGES |= {"int": RANGES["int64"], "uint": RANGES["uint64"]}

#: What Python has for one item of each type.
NATURAL: dict[str, type] = {
    "bool": bool,
    "string": str,
    **dict.fromkeys(RANGES, int),
    "float32": float,
    "float64": float,
}


class Number(float):
    """Number from the wire whose text matters: `-0`, `1e400`, or one that an error text quotes."""

    __slots__ = ("token",)
    token: str

    def __new__(cls, token: str) -> Number:
        number = super().__new__(cls, token)
        number.token = token
        return number

    def __reduce__(self) -> tuple[type[Number], tuple[str]]:
        return Number, (self.token,)


def _go_text(value: Any, depth: int = 0) -> str:
    """Return the value as Go's %v prints it."""
    if value is None:
        return "<nil>"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return _token(value)
    if depth > 20:
        return "…"
    if isinstance(value, dict):
        pairs = (f"{key}:{_go_text(value[key], depth + 1)}" for key in sorted(value))
        return f"map[{' '.join(pairs)}]"
    if isinstance(value, list):
        return f"[{' '.join(_go_text(item, depth + 1) for item in value)}]"
    return repr(value)


def _token(value: float) -> str:
    if isinstance(value, Number):
        return value.token
    try:
        return repr(value)
    except ValueError:  # more than 4,300 digits
        return hex(value) if isinstance(value, int) else "?"


def _is_not(value: Any, type_name: str) -> ArgumentError:
    return ArgumentError(f"{_go_text(value)[:MAX_QUOTE]} is not {type_name}")


def _read_exactly(type_name: str, kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise _is_not(value, type_name)
    return value


def _read_int(type_name: str, low: int, high: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _is_not(value, type_name)
    token = _token(value)
    parse = f'strconv.{"Parse" + ("Int" if low else "Uint")}: parsing "{token[:MAX_QUOTE]}"'
    digits = token[1:] if token.startswith("-") and low else token
    if not digits.isdecimal():
        raise ArgumentError(f"{parse}: invalid syntax")
    number = int(token) if len(digits) < 30 else UINT64_MAX + 1
    smallest, largest = (INT64_MIN, INT64_MAX) if low else (0, UINT64_MAX)
    if not smallest <= number <= largest:
        raise ArgumentError(f"{parse}: value out of range")
    if low <= number <= high:
        return number
    return (number - low) % (high - low + 1) + low  # Go wraps, and a mixed fleet must agree


def _read_float(type_name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _is_not(value, type_name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ArgumentError(
            f'strconv.ParseFloat: parsing "{_token(value)[:MAX_QUOTE]}": value out of range'
        )
    return single(number) if type_name == "float32" else number


def single(number: float) -> float:
    try:
        single: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return single


def _read_list(item_type: str, value: Any) -> list[Any]:
    if type(value) is list:
        kind = NATURAL[item_type]
        same = set(map(type, value)) == {kind} and item_type != "float32"
        if same and (kind is not int or within(value, *RANGES[item_type])):
            return value.copy()  # the function may change it, and the message must not
        return [READ[item_type](item) for item in value]
    if value is None or value == "" or value == {}:
        return []
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _is_not(value, f"[]{item_type}")  # a Go worker dies of this one
    # Go walks over the bytes of a string, and over the digits of a number.
    if item_type.startswith("uint"):
        return list(read_base64(value) if isinstance(value, str) else _token(value).encode())
    raise ArgumentError(
        f"{(value if isinstance(value, str) else _token(value)).encode()[0]} is not {item_type}"
    )


def _read_bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value  # it has not been on a wire
    return read_base64(value) if type(value) is str else bytes(_read_list("uint8", value))


def read_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        pass
    source = text.encode()
    offset = _base64_error(source)
    if offset is not None:
        raise ArgumentError(f"illegal base64 data at input byte {offset}")
    return base64.b64decode(source)


_BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")


def _base64_error(source: bytes) -> int | None:
    """Return where Go's decoder stops.

    It skips line breaks, requires the padding, and allows nothing behind the padding.
    """
    have = 0  # characters of the current group of four
    for at, char in enumerate(source):
        if char in _BASE64:
            have = (have + 1) % 4
        elif char not in b"\r\n":
            if char != 61 or have < 2:
                return at
            return _padding_error(source, at + 1, missing=have == 2)
    if not have:
        return None
    return len(source) - have


def _padding_error(source: bytes, at: int, *, missing: bool) -> int | None:
    rest = source[at:].lstrip(b"\r\n")
    at = len(source) - len(rest)
    if missing:
        if not rest:
            return len(source)
        if not rest.startswith(b"="):
            return at - 1
        rest = rest[1:].lstrip(b"\r\n")
    return len(source) - len(rest) if rest else None


def within(numbers: Iterable[int], low: int, high: int) -> bool:
    """Return whether all of the numbers (at least one) lie in the range."""
    return low <= min(numbers) and max(numbers) <= high


READ: dict[str, Callable[[Any], Any]] = {
    "bool": functools.partial(_read_exactly, "bool", bool),
    "string": functools.partial(_read_exactly, "string", str),
    **{name: functools.partial(_read_int, name, low, high) for name, (low, high) in RANGES.items()},
    "float32": functools.partial(_read_float, "float32"),
    "float64": functools.partial(_read_float, "float64"),
    **{f"[]{name}": functools.partial(_read_list, name) for name in NATURAL},
    "[]byte": _read_bytes,
    "[]uint8": _read_bytes,
}
