"""Wrong passwords: who is slowed, for how long, and what the log says."""

from __future__ import annotations

import logging

import pytest

from machinery_py.dashboard import guesses
from machinery_py.dashboard.guesses import FREE, MOST_KEPT, PAUSE, SAY_EVERY, Guesses


class Time:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def spend(found: Guesses, address: str) -> int:
    """Guess until that is refused, and return how often it was not."""
    for number in range(10 * FREE):
        if found.pause(address, ()):
            return number
        found.was_wrong(address)
    raise AssertionError("never refused")


def test_one_guess_a_second_is_left_of_many(time: Time) -> None:
    found = Guesses(time)
    assert spend(found, "10.0.0.7") == FREE

    time.now += 10 * PAUSE
    assert spend(found, "10.0.0.7") == 10
    time.now += 1000 * PAUSE
    assert spend(found, "10.0.0.7") == FREE


def test_guesses_that_are_being_tried_count(time: Time) -> None:
    found = Guesses(time)
    assert [found.pause("a", ()) for _ in range(FREE + 1)] == [0.0] * FREE + [PAUSE]


def test_right_one_is_given_back(time: Time) -> None:
    found = Guesses(time)
    for _ in range(10 * FREE):
        assert not found.pause("a", ())
        found.was_right("a", ())


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ],
)
def test_a_household_is_one_guesser(time: Time, one: str, other: str, are_one: bool) -> None:
    found = Guesses(time)
    spend(found, one)
    assert bool(found.pause(other, ())) is are_one


def test_addresses_and_browsers_that_are_kept_are_bounded(time: Time) -> None:
    found = Guesses(time)
    for number in range(2 * MOST_KEPT):
        address = f"10.0.{number // 256}.{number % 256}"
        assert not found.pause(address, ())
        found.was_right(address, [str(number)])

    assert len(found._guessers) == len(found._known) == MOST_KEPT


def test_log_has_few_lines_and_all_numbers(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    found = Guesses(time)
    with caplog.at_level(logging.WARNING, guesses.__name__):
        for _ in range(100):
            found.was_wrong("10.0.0.7")
        found.was_wrong("10.0.0.8")  # too soon after the other
        time.now += SAY_EVERY
        found.was_wrong("10.0.0.7")
        time.now += guesses.SAY_PAUSE
        found.was_wrong("10.0.0.8")

    assert [one.getMessage() for one in caplog.records] == [
        "dashboard: 1 wrong password from '10.0.0.7'",
        "dashboard: 100 wrong passwords from '10.0.0.7'",
        "dashboard: 2 wrong passwords from '10.0.0.8'",
    ]
