"""Drafts of steps: several features add to one step what must become true together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from machinery_py.clock import Clock, micros
from machinery_py.rows.contract import (
    NO_ROW,
    Conflict,
    Key,
    Patience,
    StepResult,
    StoredRow,
)
from machinery_py.rows.messages import MessageStep

T = TypeVar("T")


class Draft(MessageStep, kw_only=True, gc=False):
    """A step that is being written, over rows that were read. Belongs to one thread.

    Attributes:
        found: the rows that were read.
        read_at: µs since 1970 by the clock on the wall, before the rows were read.
    """

    found: Mapping[Key, StoredRow | None]
    read_at: int

    def row(self, key: Key) -> StoredRow | None:
        """Return a row that was read; the step then holds only if it is the same."""
        row = self.found[key]
        self.expect[key] = NO_ROW if row is None else row.version
        return row

    def is_empty(self) -> bool:
        """Return whether the step would change nothing."""
        return not (
            self.write or self.create or self.takes or self.pushes or self.joins or self.tell
        )


class StepRows(Protocol):
    """Part of MessageRows that drafts need, and that rows in a transaction have."""

    clock: Clock

    def read(self, keys: Sequence[Key], /) -> list[StoredRow | None]: ...
    def commit(self, steps: Sequence[MessageStep], /) -> list[StepResult]: ...


def read(rows: StepRows, keys: Iterable[Key]) -> dict[Key, StoredRow | None]:
    """Return the rows of these keys."""
    wanted = list(dict.fromkeys(keys))
    return dict(zip(wanted, rows.read(wanted), strict=True)) if wanted else {}


def carry_out(
    rows: StepRows, keys: Iterable[Key], plan: Callable[[Draft], T], *, new: bool = False
) -> tuple[T, StepResult | None]:
    """Carry out what `plan` drafts over the rows of these keys, as one step.

    Returns its result, and what became of the step; None: it was empty. `plan` is called again when
    a row has changed meanwhile, so it must be pure.

    Args:
        new: most likely there are none of these rows: they are read only if that is wrong.

    Raises:
        BackendUnavailable: also if others change the rows all the time.
    """
    wanted = list(keys)
    patience: Patience | None = None
    while True:
        read_at = micros(rows.clock.now())
        found = dict.fromkeys(wanted) if new else read(rows, wanted)
        draft = Draft(found=found, read_at=read_at)
        result = plan(draft)
        if draft.is_empty():
            return result, None
        [done] = rows.commit([draft])
        if type(done) is not Conflict:
            return result, done
        if new:
            new = False
            continue
        patience = patience or Patience()
        patience.wait()
