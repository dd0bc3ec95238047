"""Options with values that make no sense are refused where they are given, in words."""

from __future__ import annotations

import datetime as dt
from fractions import Fraction
from typing import Any

import pytest

from machinery_py import Server


@pytest.mark.parametrize(
    "options",
    [
        {"delay": -5},
        {"delay": dt.timedelta(seconds=-5)},
        {"delay": "5"},
        {"priority": -1},
        {"priority": 256},
        {"retries": -1},
        {"retries": True},
        {"time_limit": -1},
        {"block": -1},
        {"queue": 5},
        {"queue": None},
        {"uuid": 5},
        {"headers": 5},
        {"headers": None},
        {"unique": 5},
        {"ignore_result": "no"},
        {"ignore_result": None},
    ],
    ids=str,
)
def test_call_with_a_value_that_makes_no_sense_is_refused(options: Any) -> None:
    work = Server("memory://").task("work")(print)
    [(option, value)] = options.items()
    with pytest.raises(ValueError, match=rf"work: {option}=.* \(expected ") as caught:
        work.options(**options)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"queue": 5}, {"unique": 5}, {"ignore_result": "no"}, {"retries": "3"}, {"unique_key": 5}],
    ids=str,
)
def test_task_with_a_value_that_makes_no_sense_is_refused(options: Any) -> None:
    [option] = options
    with pytest.raises(ValueError, match=rf"work: {option}=.* \(expected "):
        Server("memory://").task("work", **options)(print)


def test_task_reads_numbers_of_any_kind() -> None:
    """As numpy's: what is not a float is written to no store."""
    third = Fraction(1, 3)
    server = Server("memory://")

    @server.task(result_expires=third, unique=True, unique_for=third, time_limit=third)
    def work() -> None: ...

    found = work.settings
    for value in (found.result_expires, found.unique_for, found.time_limit):
        assert (type(value), value) == (float, 1 / 3)


def test_call_with_a_delay_and_an_eta_is_refused() -> None:
    work = Server("memory://").task("work")(print)
    eta = dt.datetime.now(dt.timezone.utc)
    with pytest.raises(ValueError, match="work: delay=5 and eta=.*expected one of them"):
        work.options(delay=5, eta=eta)
    assert work.options(eta=eta).options(delay=5).signature().eta is None  # the later one counts
