"""Tries of a task, in a header of the next one's message."""

from __future__ import annotations

import datetime as dt

import pytest

from machinery_py.tasks.attempts import MOST, Attempt, attempts_of, with_attempt
from machinery_py.tasks.signature import HEADER_ATTEMPTS, Signature
from machinery_py.wire.signatures import decode_signature, encode_signature

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.timezone.utc)


def attempt(number: int, error: str = "x") -> Attempt:
    return Attempt(number, NOW, NOW + dt.timedelta(seconds=1), "w", "OSError", error)


def test_first_and_last_tries_are_kept() -> None:
    signature = Signature[object](name="t", headers={"tenant": "acme"})
    for number in range(1, 31):
        signature = with_attempt(signature, attempt(number))

    kept = attempts_of(decode_signature(encode_signature(signature)))

    assert [one.number for one in kept] == [1, *range(31 - MOST + 1, 31)]
    assert len(kept) == MOST
    assert kept[-1] == attempt(30)
    assert signature.headers["tenant"] == "acme"


def test_error_is_cut_and_can_be_sent() -> None:
    signature = with_attempt(Signature[object](name="t"), attempt(1, "\ud800 " + "é" * 500))

    [kept] = attempts_of(decode_signature(encode_signature(signature)))

    assert kept.error.startswith("\\ud800 é")
    assert len(kept.error.encode()) <= 250


@pytest.mark.parametrize("header", [7, None, "", "[", "[[1]]", '[["a",null,1,2,3,4]]', "\ud800"])
def test_header_of_somebody_else_is_no_attempt(header: object) -> None:
    signature = Signature[object](name="t", headers={HEADER_ATTEMPTS: header})

    assert attempts_of(signature) == ()
    assert len(attempts_of(with_attempt(signature, attempt(1)))) == 1
