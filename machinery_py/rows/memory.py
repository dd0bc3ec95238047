"""Rows in this process: for tests, and the reference that the others are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import micros
from machinery_py.connections.memory import MemoryHub
from machinery_py.rows.contract import (
    NO_ROW,
    PAGE,
    Committed,
    Conflict,
    Decision,
    Key,
    Repeated,
    Rows,
    RowStep,
    StepResult,
    StoredRow,
    Version,
    Write,
    check_keys,
    check_step,
    check_writes,
    page_of,
)

T = TypeVar("T")


@dataclass(slots=True)
class _Kept:
    """A row, when it expires, and the moment that `_expiring` has for it."""

    row: StoredRow
    expires_at: int | None
    noted_at: int | None = None

    def is_there(self, now: int) -> bool:
        return self.expires_at is None or self.expires_at > now


class MemoryRows(Rows):
    """Dicts under the hub's lock. Time goes at the pace of the monotonic clock."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self._began_at = micros(hub.clock.now()) - round(hub.clock.monotonic() * 1e6)
        self._kinds: dict[str, dict[str, _Kept]] = {}  # by kind and id
        self._expiring: list[tuple[int, Key]] = []

    def now(self) -> int:
        return self._began_at + round(self.hub.clock.monotonic() * 1e6)

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        check_keys(keys)
        with self.hub.lock:
            now = self.now()
            return [self._read(key, now) for key in keys]

    def _read(self, key: Key, now: int) -> StoredRow | None:
        kept = self._kinds.get(key.kind, {}).get(key.id)
        return kept.row if kept is not None and kept.is_there(now) else None

    def commit(self, steps: Sequence[RowStep]) -> list[StepResult]:
        for step in steps:
            check_step(step)
        with self.hub.lock:
            return [self._step(step) for step in steps]

    def _step(self, step: RowStep) -> StepResult:
        now = self.now()
        if step.once is not None and self._read(step.once, now) is not None:
            return Repeated()
        for key, version in step.expect.items():
            row = self._read(key, now)
            if (NO_ROW if row is None else row.version) != version:
                return Conflict()
        new = {key: one for key, one in step.create.items() if self._read(key, now) is None}
        self._write(new, now)
        return Committed(self._write(step.write, now), now)

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """As the contract says, under the lock: nobody else writes meanwhile."""
        check_keys(keys)
        with self.hub.lock:
            now = self.now()
            write, result = decide([self._read(key, now) for key in keys], now)
            check_writes(write)
            self._write(write, now)
            return result

    def _write(self, write: Mapping[Key, Write | None], now: int) -> Version:
        """Write the rows, and return the last version."""
        if self._expiring and self._expiring[0][0] <= now:
            self.expire(1 + len(write))  # faster than new rows come
        given = NO_ROW
        for key, one in write.items():
            kind = self._kinds.setdefault(key.kind, {})
            if one is None:
                kind.pop(key.id, None)
                continue
            given = Version(self.hub.fences.next())
            row = StoredRow(key=key, body=one.body, version=given, facts=one.facts)
            ends = None if one.expires_in is None else now + one.expires_in
            kept = kind.get(key.id)
            if kept is None:
                kept = kind[key.id] = _Kept(row, ends)
            else:
                kept.row, kept.expires_at = row, ends
            self._note(kept)
        return given

    def _note(self, kept: _Kept) -> None:
        """Note when to look whether the row has expired: once, however often it is written."""
        at = kept.expires_at
        if at is not None and (kept.noted_at is None or at < kept.noted_at):
            kept.noted_at = at
            heapq.heappush(self._expiring, (at, kept.row.key))

    def list(
        self,
        kind: str,
        *,
        name: str | None = None,
        after: StoredRow | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredRow]:
        with self.hub.lock:
            now = self.now()
            found = [self._read(Key(kind, id), now) for id in self._kinds.get(kind, {})]
        behind = None if after is None else _place(after)
        listed = [
            row
            for row in found
            if row is not None
            and row.facts is not None
            and name in (None, row.facts.name)
            and (behind is None or _place(row) < behind)
        ]
        return page_of(heapq.nlargest(items, listed, key=_place), size)

    def expire(self, items: int) -> bool:
        with self.hub.lock:
            now = self.now()
            for _ in range(items):
                if not self._expiring or self._expiring[0][0] > now:
                    return False
                at, key = heapq.heappop(self._expiring)
                kept = self._kinds[key.kind].get(key.id)
                if kept is None or kept.noted_at != at:
                    continue  # of a row that was deleted, or noted for earlier
                if kept.is_there(now):
                    kept.noted_at = None
                    self._note(kept)
                else:
                    del self._kinds[key.kind][key.id]
            return bool(self._expiring) and self._expiring[0][0] <= now


def _place(row: StoredRow) -> tuple[int, str]:
    return row.facts.at if row.facts is not None else 0, row.key.id
