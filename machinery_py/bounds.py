"""Bounds of one step of a store: a script, a transaction, a command, a reply.

While a store carries out a step it answers nobody else, and a step that takes longer than its
timeout is begun again from nothing. So all that carries bodies (messages, results, dead letters,
outboxes) to a store or from it is divided into steps of STEP_BYTES and STEP_ITEMS, with one item at
least: an item is as large as its sender made it. Who takes fewer items says why, beside its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

STEP_BYTES = 4 * 2**20  # of bodies in one step; Redis needs some 20 ms for them
STEP_ITEMS = 1000  # messages, states, rows or names in one step; Redis needs some 20 ms for them
PURGE_STEP = 200  # messages of one step of `Broker.purge_each`, at most
LISTING_STEP = 10_000  # states that one step of a listing looks at, where it decodes each
CHECKPOINTS = 1000  # of one task
CHECKPOINT_LIFE = 365 * 86400  # seconds, while their task is not over or is a dead letter
MOST_SIGNALS = 1000  # of one task, unread
SIGNALS_BYTES = 2**20  # of their values
CHECKPOINT_BYTES = 2**20  # of all checkpoints of one task: a store reads them in one step
AT_ONCE = 8  # items that a script takes where their sizes are not known before

TOKEN_LIFE = 600  # seconds that a submission is known by its token; a repeat of it does nothing
LONGEST_PUBLISH = 300  # seconds that it may be repeated

T = TypeVar("T")


def pieces(
    items: Sequence[T], size_of: Callable[[T], int], *, most: int, most_bytes: int = STEP_BYTES
) -> Iterator[Sequence[T]]:
    """Divide items, in their order, into steps of at most `most` items and `most_bytes`."""
    first = size = 0
    for at, item in enumerate(items):
        more = size_of(item)
        if at > first and (at - first >= most or size + more > most_bytes):
            yield items[first:at]
            first, size = at, 0
        size += more
    if first < len(items):
        yield items[first:]


def in_steps(items: Sequence[T], most: int = STEP_ITEMS) -> Iterator[Sequence[T]]:
    """Divide items, in their order, into steps of at most so many."""
    return (items[start : start + most] for start in range(0, len(items), most))


def size_of(value: object) -> int:
    """Return about how many bytes a JSON value takes, without encoding it."""
    match value:
        case None | int() | float():
            return 8
        case str() | bytes() | bytearray():
            return len(value) + 2
        case Mapping():
            return _size_of_all(value.keys()) + _size_of_all(value.values())
        case list() | tuple() | set() | frozenset():
            return _size_of_all(value)
        case _:
            return 8


def _size_of_all(values: Iterable[object]) -> int:
    return sum(map(size_of, values)) + 2


class ClaimLimit:
    """Bound of claims where a store does not tell the size of a message before it is read.

    A claim takes as many as fit by the largest of the last one; after one that failed, half of it.
    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._largest = 1
        self._most = 0  # after a failure; 0: none

    def of(self, wanted: int) -> int:
        """Return how many of so many may be claimed at once."""
        fit = max(1, STEP_BYTES // self._largest)
        return min(wanted, fit, self._most or wanted)

    def took(self, sizes: Iterable[int]) -> None:
        """Note what a claim has brought."""
        self._largest = max(sizes, default=1) or 1
        self._most = 2 * self._most if self._most < STEP_BYTES else 0

    def failed(self, limit: int) -> None:
        """Note that a claim of so many failed."""
        self._most = max(1, limit // 2)
