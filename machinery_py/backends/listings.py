"""Listings of the states in a backend, and counts of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Sequence

import msgspec

from machinery_py.clock import moment_of
from machinery_py.errors import Unsupported
from machinery_py.tasks.states import State, TaskState

#: What a refusal recommends: these result backends keep all that is in `BackendFeatures`.
COMPLETE = "put the results into Redis, PostgreSQL, MongoDB or SQLite"

Place = tuple[int, str]
"""Of a task in the listing: µs of its last change, and its UUID as the store writes it."""


class Listing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stretch of the states, the last changed first; those of one µs by falling UUIDs.

    Attributes:
        found: the states that fit, and their places.
        end: the stretch reaches as far as this place; None: there is nothing behind it.
        looked: how many states were looked at.
    """

    found: Sequence[tuple[Place, TaskState]]
    end: Place | None
    looked: int


class Count(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How many tasks of a queue ended within a step of time, which began at `at`."""

    at: dt.datetime
    queue: str
    succeeded: int
    failed: int


def counts_of(rows: Iterable[tuple[int, str, int, int]]) -> list[Count]:
    """Add up (unix second, queue, succeeded, failed), the earliest first."""
    sums: dict[tuple[int, str], tuple[int, int]] = {}
    for second, queue, good, bad in rows:
        before = sums.get((second, queue), (0, 0))
        sums[second, queue] = before[0] + good, before[1] + bad
    return [
        Count(at=moment_of(second * 1_000_000), queue=queue, succeeded=good, failed=bad)
        for (second, queue), (good, bad) in sorted(sums.items())
    ]


class StateLister:
    """The part of a backend that lists; every method refuses by default.

    `BackendFeatures.listing` says whether it does. All methods may be called from any thread.
    """

    def list_states(
        self,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        """Look through the states behind the place `after`; without it, from the last change on.

        One step of the store, which holds up nobody: it ends early when `limit` have been found,
        and may have found none though there are more behind its end.

        Args:
            states: those that fit; none: all.
            since: changed at or after that moment.

        Raises:
            Unsupported: this backend cannot list (`BackendFeatures.listing`).
        """
        raise self._unlisted()

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        """UUIDs that begin like this. Raises as `list_states`."""
        raise self._unlisted()

    def finished_since(self, moment: dt.datetime, step: int = 3600) -> list[Count]:
        """Count the tasks that have ended since then, by queue and by steps of so many seconds.

        The steps are those of unix time. Raises as `list_states`.
        """
        raise self._unlisted()

    def _unlisted(self) -> Unsupported:
        return Unsupported(
            f"{type(self).__name__} cannot list the tasks that it keeps: ask for one by its whole "
            f"UUID, or {COMPLETE}"
        )
