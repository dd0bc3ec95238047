"""Depth of nested JSON, found without descending: one limit on every Python, whatever its own.

A decoder that descends needs stack for each level, and each version of Python ends that elsewhere,
or not at all. So a decoder gets only what is known to be shallow. Deeper messages are read piece by
piece (wire/decode.py, wire/go_json.py), and a deeper value is refused.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

from machinery_py.values.json_values import MAX_DEPTH

MAX_LEVELS = 10_000  # of a whole message: Go's limit. A chain has two for each step
AROUND_ARGS = 3  # {"Args":[{"Value":…}]}, and the same around a state's results
AROUND_RESULTS = 2  # [{"Value":…}]

_NO_MARKS = bytes(sorted({*range(256)} - {*b'"[]{}'}))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: one up, one down
# Bytes. What is closed in there has no more levels, and what is not closed is no JSON.
_SHORT = 2 * MAX_DEPTH


def is_deep(body: bytes, around: int = AROUND_ARGS) -> bool:
    """Return whether a value inside, below `around` levels, may have more than MAX_DEPTH levels.

    Exact for what is JSON; for other bytes, up to the first that is not: no decoder comes further.
    """
    length = len(body)
    if length <= _SHORT:
        return False
    limit = MAX_DEPTH + around
    # Counted like this, since replace() looks for a byte ten times as fast as count() does.
    if 2 * length - len(body.replace(b"[", b"")) - len(body.replace(b"{", b"")) <= limit:
        return False
    brackets = left = _brackets(body)
    # Most have many brackets because they are long, and few are left after three rounds.
    for removed in (2, 4, 6):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
        if len(left) <= limit - removed:
            return False
    return _deepest(brackets) > limit


def levels(body: bytes) -> int:
    """Return how many brackets are open at the deepest place."""
    return _deepest(_brackets(body))


def _brackets(body: bytes) -> bytes:
    """Return the brackets outside of strings."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(None, _NO_MARKS)
    # A string without brackets is two quotes by now. Their removal leaves every bracket inside or
    # outside of the strings, as it was.
    marks = marks.replace(b'""', b"")
    return b"".join(marks.split(b'"')[::2]) if b'"' in marks else marks


def _deepest(brackets: bytes) -> int:
    return max(accumulate(array("b", brackets.translate(_STEPS))), default=0)
