"""How long to wait before the next try."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py.tasks.backoff import (
    MAX_DELAY,
    Backoff,
    Jitter,
    check_backoff,
    delay_for,
    doubled,
    exponential,
    full_jitter,
    next_fibonacci,
)
from tests.wire.golden_files import FOLDER

GO = json.loads((FOLDER / "fibonacci.json").read_text(encoding="utf-8"))


def test_fibonacci_is_gos() -> None:
    assert all(next_fibonacci(before) == after for before, after in GO["next"] if before >= 0)
    previous, delays = 0, []
    for _ in range(8):
        previous = int(delay_for("fibonacci", 1, previous))
        delays.append(previous)
    assert delays == [1, 2, 3, 5, 8, 13, 21, 34]


@given(st.integers(0, 10**9))
def test_fibonacci_is_the_next_above(after: int) -> None:
    assert after < next_fibonacci(after) <= max(1, 2 * after + 1)


@pytest.mark.parametrize(
    ("attempt", "expected"), [(1, 10.0), (2, 60.0), (3, 600.0), (4, 600.0), (99, 600.0)]
)
def test_listed_delays_go_on_with_the_last(attempt: int, expected: float) -> None:
    assert delay_for([10, 60, 600], attempt, 0) == expected


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        (lambda n: n * 30.0, 90.0),
        (lambda n: 1e9, MAX_DELAY),
        (lambda n: math.inf, MAX_DELAY),
        ((0.25,), 0.25),
    ],
)
def test_a_function_or_list_is_kept_within_limits(backoff: Backoff, expected: float) -> None:
    assert delay_for(backoff, 3, 0) == expected


@given(st.integers(1, 1000))
def test_exponential_doubles_up_to_its_cap_and_scatters_by_half(attempt: int) -> None:
    full = doubled(attempt)
    assert full == min(600.0, 2.0 ** min(attempt - 1, 60))
    assert full / 2 <= delay_for("exponential", attempt, 0) <= full


@given(st.floats(0, 1e6), st.integers())
def test_full_jitter_is_between_nothing_and_all(delay: float, seed: int) -> None:
    assert 0 <= full_jitter(delay, random.Random(seed)) <= delay


def test_an_unknown_word_is_told_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"backoff 'fibonaci': unknown \(known: 'fibonacci', 'exponential'"
    ):
        check_backoff("fibonaci")


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 86401, "5"])
def test_list_with_what_is_no_pause_is_refused(seconds: float) -> None:
    with pytest.raises(
        ValueError, match=rf"found {seconds!r} \(expected seconds or a timedelta for each try"
    ):
        check_backoff([1, seconds])


@pytest.mark.parametrize(
    "backoff", [lambda n: -5.0, lambda n: math.nan, lambda n: None, lambda n: 1 // 0]
)
def test_function_that_gives_no_pause_is_logged(
    backoff: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert delay_for(backoff, 3, 2) == 3.0  # Fibonacci's
    assert "the back-off function failed after try 3" in caplog.text


def test_exponential_backoff_has_a_factor_and_a_cap() -> None:
    backoff = exponential(base=10, cap=60, jitter=None)

    assert [delay_for(backoff, attempt, 0) for attempt in range(1, 6)] == [10, 20, 40, 60, 60]


@pytest.mark.parametrize(("jitter", "least"), [("full", 0.0), ("half", 8.0)])
def test_jitter_scatters_evenly(jitter: Jitter, least: float) -> None:
    random.seed(7)
    backoff = exponential(base=2, jitter=jitter)

    pauses = [backoff(4) for _ in range(1000)]

    assert all(least <= pause <= 16 for pause in pauses)
    assert sum(pauses) / 1000 == pytest.approx((least + 16) / 2, abs=0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"base": 0}, "base: found 0 .*more than 0"),
        ({"cap": -1.0}, "cap: found -1.0 .*more than 0"),
        ({"jitter": "ful"}, "expected 'full', 'half' or None"),
    ],
)
def test_exponential_refuses_what_makes_no_sense(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        exponential(**options)
