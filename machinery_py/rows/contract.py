"""The contract of rows: read some, decide, and commit a step that holds only if they are the same.

A feature that keeps its records as rows is written once, for every store that has rows. A row has a
key, bytes that the feature alone understands, and a version. A step is carried out whole or not at
all: first each row of `expect` is compared, then each row of `write` is written.

    read ──► decide (pure) ──► commit ──► Committed
     ▲                            │
     └──────── Conflict ──────────┘            `Rows.change` is this loop

Invariants, on every store:

- A version is a fence (fences.py), from the one sequence of the store: it is greater than all
  versions and fences given before, also those of rows that are gone, and those from before the
  clock was set back. So it never means two bodies.
- An expired row does not exist: for `read`, `list` and `expect` alike, whether it was deleted or
  not.
- A step that lost its reply may be repeated. It then conflicts with itself; the feature reads
  again, and finds what it wrote.

Expired rows are deleted while others are written, and by `expire`.

Bounds: a row is as large as its feature makes it, and a step writes few rows. Steps and listings
are carried in pieces of bounds.STEP_BYTES, with one step or row at least.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NewType, TypeVar

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.errors import BackendUnavailable
from machinery_py.fences import Fence

PATIENCE = 5.0  # seconds for rows that others change all the time
PAUSE = 0.0005, 0.02  # seconds until they are read again
PAGE = 1000  # rows
T = TypeVar("T")

Version = NewType("Version", Fence)
NO_ROW = Version(Fence(0))


class Key(NamedTuple):
    """The name of a row. `kind`: a constant of a feature, ASCII; `id`: any text."""

    kind: str
    id: str


class Facts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Properties that rows of a kind are listed by.

    Attributes:
        at: µs since 1970; listings begin with the latest.
        name: rows of one name can be listed alone.
    """

    at: int
    name: str = ""


class StoredRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row as it was at one moment."""

    key: Key
    body: bytes
    version: Version
    facts: Facts | None = None


class Write(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New content of a row.

    Attributes:
        expires_at: µs since 1970 by the store's clock, the first moment without the row; None:
            never.
        facts: None: the row is in no listing.
    """

    body: bytes
    expires_at: int | None = None
    facts: Facts | None = None


class RowStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Changes that become true together, or not at all.

    Attributes:
        expect: all rows that the decision has read, with their versions; NO_ROW: there was none.
        write: the new content of each row; None: delete it.
        durable: False: a power cut may undo it, where that is cheaper.
    """

    expect: Mapping[Key, Version] = {}
    write: Mapping[Key, Write | None] = {}
    durable: bool = True

    def size(self) -> int:
        """Return how many bytes of bodies it carries."""
        return sum(len(write.body) for write in self.write.values() if write is not None)


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The step is true. `version`: the greatest that it gave to a row; NO_ROW if it wrote none."""

    version: Version


class Conflict(msgspec.Struct, frozen=True, gc=False):
    """A row is another one than the step expects; nothing was written."""


#: Gets the rows and the store's time in µs, and returns what to write, and a result. It is called
#: again when a row has changed meanwhile, so it must be pure.
Decision = Callable[[Sequence[StoredRow | None], int], tuple[Mapping[Key, Write | None], T]]


class Rows(ABC):
    """A store of rows. Any thread may call any method.

    Raises (each method):
        BackendUnavailable: the store did not answer in time; a step may have become true.
        StoreUnusable: the store cannot be worked with.
    """

    @abstractmethod
    def now(self) -> int:
        """Return the time by the store's clock, in µs since 1970."""

    @abstractmethod
    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        """Return the row of each key, or None; all as of one moment."""

    @abstractmethod
    def commit(self, steps: Sequence[RowStep]) -> list[Committed | Conflict]:
        """Carry out each step by itself, in this order; later ones see what earlier ones wrote."""

    @abstractmethod
    def list(
        self,
        kind: str,
        *,
        name: str | None = None,
        after: StoredRow | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredRow]:
        """Return rows of the kind that have facts: a page, which is empty only behind the last row.

        The latest `Facts.at` comes first; of one moment the greater id.

        Args:
            name: only those with this `Facts.name`.
            after: begin behind this row of an earlier page, which may be gone by now.
            items, size: end the page with so many rows, or before the bodies exceed so many bytes.
        """

    def list_all(self, kind: str) -> Iterator[StoredRow]:
        """Yield all that `list` has of the kind, page by page: not as of one moment."""
        after = None
        while page := self.list(kind, after=after):
            yield from page
            after = page[-1]

    @abstractmethod
    def expire(self, items: int) -> bool:
        """Delete up to so many expired rows, of all kinds; return whether more may be left."""

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """Write what `decide` makes of these rows, as one step, and return its result.

        Raises:
            BackendUnavailable: also if others change the rows all the time.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            rows = self.read(keys)
            write, result = decide(rows, self.now())
            if not write:
                return result
            seen = [NO_ROW if row is None else row.version for row in rows]
            expect = dict(zip(keys, seen, strict=True))
            [done] = self.commit([RowStep(expect=expect, write=write, durable=durable)])
            if isinstance(done, Committed):
                return result
            if time.monotonic() > deadline:
                raise BackendUnavailable(
                    f"{keys[0].kind} {keys[0].id!r} was changed by others for {PATIENCE} s "
                    "(too many processes change one row)"
                )
            time.sleep(random.uniform(*PAUSE))


def page_of(rows: Sequence[StoredRow], size: int) -> list[StoredRow]:
    """Return the first rows whose bodies are so many bytes at most; one row at least."""
    taken = 0
    for count, row in enumerate(rows):
        taken += len(row.body)
        if count and taken > size:
            return list(rows[:count])
    return list(rows)
