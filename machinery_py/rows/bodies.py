"""Bodies of rows: msgpack, of texts that may not be UTF-8."""

from __future__ import annotations

import datetime as dt

import msgspec

from machinery_py.texts import printable

_encode = msgspec.msgpack.Encoder().encode


def encode(value: object) -> bytes:
    """Return the value as msgpack; half a surrogate pair in a text is written out."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, dt.datetime))
        return _encode(_readable(plain))


def _readable(value: object) -> object:
    match value:
        case str():
            return printable(value)
        case dict():
            return {_readable(key): _readable(one) for key, one in value.items()}
        case list() | tuple():
            return [_readable(one) for one in value]
        case _:
            return value
