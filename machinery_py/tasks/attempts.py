"""Tries of a task that another try followed, as they travel with the message of the next one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import msgspec

from machinery_py.tasks.signature import HEADER_ATTEMPTS, AttemptNumber, Signature
from machinery_py.texts import cut, printable
from machinery_py.values.malformed import MALFORMED

MOST = 20  # that are kept: the first and the last ones
MAX_TEXT = 200  # characters of an error


class Attempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A try that ended in RETRY.

    Attributes:
        number: 1 for the first; a postponed or lost one has the number of the next.
        started_at: None if it did not start.
    """

    number: AttemptNumber
    started_at: dt.datetime | None
    ended_at: dt.datetime
    worker: str
    error_type: str
    error: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[Attempt, ...]).decode


def attempts_of(signature: Signature[Any]) -> Sequence[Attempt]:
    """Return the tries before this one; none of a header that is not ours."""
    text = signature.headers.get(HEADER_ATTEMPTS)
    try:
        return _decode(text) if isinstance(text, str) else ()
    except MALFORMED:
        return ()


def with_attempt(signature: Signature[Any], attempt: Attempt) -> Signature[Any]:
    """Return the signature of the next try, with one more before it."""
    attempt = msgspec.structs.replace(
        attempt,
        error=printable(cut(attempt.error, MAX_TEXT)),
        worker=printable(attempt.worker),
        error_type=printable(attempt.error_type),
    )
    before = attempts_of(signature)
    kept = (*before[:1], *before[1:][2 - MOST :], attempt)
    return signature.with_headers(**{HEADER_ATTEMPTS: _encode(kept).decode()})
