"""The check that a value comes to its task as it was sent."""

from __future__ import annotations

import datetime as dt
import enum
from typing import Any

from machinery_py.values.records import compared, is_record

SCALARS = frozenset((str, int, float, bool, type(None)))
_BYTES = (bytes, bytearray, memoryview)


def unchanged(sent: Any, got: Any, within: bool = False) -> bool:
    """Return whether a task got what was sent.

    An annotation may make more of plain values: a date of a text, a dataclass of a dict. What is
    no plain value must come as the same class with equal values; a tuple may come as a list.

    Args:
        within: it is a part of an object, which is equal only if its parts are.
    """
    if sent is got:
        return True
    kind: Any = type(sent)
    if kind in SCALARS:
        return not within or _equal(sent, got)
    if is_record(kind) and not hasattr(kind, "__pydantic_extra__"):
        if type(got) is not kind:
            return False
        for one, other in zip(compared(sent), compared(got), strict=True):
            if type(one) in SCALARS:
                if not _equal(one, other):
                    return False
            elif not unchanged(one, other, True):
                return False
        return True
    if isinstance(sent, dict):
        if not isinstance(got, dict):
            return not within
        return len(sent) == len(got) and all(
            unchanged(key, other, within) and unchanged(item, item_got, within)
            for (key, item), (other, item_got) in zip(sent.items(), got.items(), strict=True)
        )
    if isinstance(sent, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return not within
        return len(sent) == len(got) and all(
            unchanged(item, other, within) for item, other in zip(sent, got, strict=True)
        )
    if isinstance(sent, enum.Enum):  # its members are the same objects; an IntEnum fits an int
        return not within and isinstance(sent, (str, int)) and _equal(sent, got)
    if isinstance(sent, dt.datetime):
        # Moments of a zone that an hour repeats are unequal to those of any other.
        return isinstance(got, dt.datetime) and sent.isoformat() == got.isoformat()
    if hasattr(kind, "__pydantic_fields__") and hasattr(sent, "__pydantic_extra__"):
        return type(got) is kind and all(
            unchanged(getattr(sent, name, None), getattr(got, name, None), True)
            for name in ("__dict__", "__pydantic_extra__", "__pydantic_private__")
        )
    if isinstance(sent, (set, frozenset, str, int, float)):
        return _equal(sent, got)
    if isinstance(sent, _BYTES):
        return isinstance(got, _BYTES) and bytes(sent) == bytes(got)
    if kind.__module__ == "numpy":
        return _equal(sent, got)
    # What has no equality of its own, such as a lock, is no part of the value.
    return type(got) is kind and (_has_no_equality(kind) or _equal(sent, got))


def _has_no_equality(kind: Any) -> bool:
    return kind.__eq__ is object.__eq__


def _equal(sent: Any, got: Any) -> bool:
    try:
        return bool(sent == got)
    except Exception:  # user code
        return False
