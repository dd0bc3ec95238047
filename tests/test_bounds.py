"""Division into steps that a store can carry out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from machinery_py.bounds import STEP_BYTES, ClaimLimit, pieces, size_of


@given(st.lists(st.integers(0, 30)), st.integers(1, 5), st.integers(1, 20))
def test_pieces_are_all_items_within_bounds(sizes: list[int], most: int, most_bytes: int) -> None:
    found = list(pieces(sizes, lambda size: size, most=most, most_bytes=most_bytes))

    assert [one for piece in found for one in piece] == sizes
    for piece, then in itertools.zip_longest(found, found[1:], fillvalue=()):
        assert 1 <= len(piece) <= most
        assert len(piece) == 1 or sum(piece) <= most_bytes
        # None is smaller than it must be.
        assert not then or len(piece) == most or sum(piece) + then[0] > most_bytes


def test_size_of_a_value_is_about_that_of_its_json() -> None:
    assert size_of("x" * 1000) == 1002
    assert 1000 <= size_of([b"x" * 500, {"a": ["y" * 500]}]) <= 1100
    assert size_of(7) == size_of(None) == 8


def test_claim_limit_follows_the_largest_of_the_last_claim() -> None:
    limit = ClaimLimit()
    assert limit.of(100) == 100
    limit.took([10, STEP_BYTES // 3, 20])
    assert limit.of(100) == 3
    limit.took([2 * STEP_BYTES])
    assert limit.of(100) == 1
    limit.took([])
    assert limit.of(100) == 100


def test_claim_limit_is_halved_by_failures_and_grows_again() -> None:
    limit = ClaimLimit()
    seen = []
    for _ in range(4):
        seen.append(limit.of(100))
        limit.failed(seen[-1])
    assert seen == [100, 50, 25, 12]
    limit.failed(1)
    assert limit.of(100) == 1
    for wanted in (2, 4, 8):
        limit.took([1])
        assert limit.of(100) == wanted
