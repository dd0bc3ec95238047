"""The logical clock. Rows of the checklist stand in the docstrings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py.control.lamport import MOST, MOST_RECEIVED, LamportClock
from machinery_py.events import WorkerOnline
from machinery_py.testing.waiting import together

NODES = 4

#: An event of a node: None is one of its own; else it receives the message that this earlier event
#: has sent, if there is one.
GRAPHS = st.lists(st.tuples(st.integers(0, NODES - 1), st.none() | st.integers(0, 30)), max_size=40)


def test_clock_starts_at_zero_or_at_a_value_and_counts_events() -> None:
    """L04, L05, L06, L10."""
    clock = LamportClock()

    assert (clock.value, clock.forward(), clock.forward(), clock.value) == (0, 1, 2, 2)
    assert LamportClock(7).forward() == 8
    assert (str(clock), repr(clock)) == ("2", "LamportClock(2)")
    with pytest.raises(ValueError, match=r"found -1 \(expected 0 to"):
        LamportClock(-1)


@pytest.mark.parametrize(
    ("own", "received", "then"), [(0, 5, 6), (5, 0, 6), (5, 5, 6), (9, 5, 10), (9, 10, 11)]
)
def test_receipt_is_later_than_both_clocks(own: int, received: int, then: int) -> None:
    """L03, L07, L13: what comes without a clock counts as 0."""
    clock = LamportClock(own)

    assert clock.adjust(received) == clock.value == then


@pytest.mark.parametrize("foreign", [-1, MOST_RECEIVED + 1, 10**400])
def test_number_that_cannot_be_a_clock_counts_as_none(foreign: int) -> None:
    clock = LamportClock(3)

    assert clock.adjust(foreign) == 4


def test_clock_stands_still_at_the_greatest_number() -> None:
    clock = LamportClock(MOST - 1)

    assert (clock.adjust(1), clock.forward()) == (MOST, MOST)


@given(GRAPHS)
def test_cause_has_a_smaller_clock_than_its_effect(events: list[tuple[int, int | None]]) -> None:
    """L01, L02, L08: in any graph of messages, without a look at a wall clock."""
    clocks = [LamportClock() for _ in range(NODES)]
    stamps: list[int] = []
    causes: list[set[int]] = []
    last: dict[int, int] = {}
    for number, (node, source) in enumerate(events):
        known = {last[node]} if node in last else set()
        if source is not None and source < number:
            known.add(source)
            stamps.append(clocks[node].adjust(stamps[source]))
        else:
            stamps.append(clocks[node].forward())
        causes.append(known.union(*(causes[one] for one in known)))
        last[node] = number

    assert all(
        stamps[cause] < stamps[event] for event, before in enumerate(causes) for cause in before
    )


@given(st.permutations([(1, "b"), (2, "a"), (2, "b"), (10, "a")]))
def test_stamps_have_one_order_by_clock_then_worker(stamps: list[tuple[int, str]]) -> None:
    """L09: equal clocks are in the order of the workers' names, on every machine."""
    events = [WorkerOnline(worker=worker, clock=clock) for clock, worker in stamps]

    assert [one.stamp for one in sorted(events, key=lambda one: one.stamp)] == [
        (1, "b"),
        (2, "a"),
        (2, "b"),
        (10, "a"),
    ]


def test_threads_lose_no_count() -> None:
    """L11."""
    clock = LamportClock()

    found = together(8, lambda _: [clock.forward() for _ in range(10_000)])

    assert sorted(one for numbers in found for one in numbers) == list(range(1, 80_001))
