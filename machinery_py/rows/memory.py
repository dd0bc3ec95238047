"""Rows in this process: for tests, and the reference that the others are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import micros
from machinery_py.connections.memory import MemoryHub
from machinery_py.rows.contract import (
    NO_ROW,
    PAGE,
    Committed,
    Conflict,
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
    page_of,
)


class MemoryRows(Rows):
    """Dicts under the hub's lock. Time goes at the pace of the monotonic clock."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self._began_at = micros(hub.clock.now()) - _monotonic(hub)
        # By kind and id: the row, and when it expires.
        self._kinds: dict[str, dict[str, tuple[StoredRow, int | None]]] = {}
        self._expiring: list[tuple[int, Version, Key]] = []

    def now(self) -> int:
        return self._began_at + _monotonic(self.hub)

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        check_keys(keys)
        with self.hub.lock:
            now = self.now()
            return [self._read(key, now) for key in keys]

    def _read(self, key: Key, now: int) -> StoredRow | None:
        row, expires_at = self._kinds.get(key.kind, {}).get(key.id, (None, None))
        return row if expires_at is None or expires_at > now else None

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
        if self._expiring and self._expiring[0][0] <= now:
            self.expire(1 + len(step.create) + len(step.write))  # faster than new rows come
        for key, new in step.create.items():
            if self._read(key, now) is None:
                self._write(key, new, now)
        given = NO_ROW
        for key, write in step.write.items():
            if write is None:
                self._kinds.get(key.kind, {}).pop(key.id, None)
            else:
                given = self._write(key, write, now)
        return Committed(given, now)

    def _write(self, key: Key, write: Write, now: int) -> Version:
        version = Version(self.hub.fences.next())
        row = StoredRow(key=key, body=write.body, version=version, facts=write.facts)
        ends = None if write.expires_in is None else now + write.expires_in
        self._kinds.setdefault(key.kind, {})[key.id] = row, ends
        if ends is not None:
            heapq.heappush(self._expiring, (ends, version, key))
        return version

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
                _, version, key = heapq.heappop(self._expiring)
                row, _ = self._kinds[key.kind].get(key.id, (None, None))
                if row is not None and row.version == version:  # else it was written again
                    del self._kinds[key.kind][key.id]
            return bool(self._expiring) and self._expiring[0][0] <= now


def _monotonic(hub: MemoryHub) -> int:
    return round(hub.clock.monotonic() * 1e6)


def _place(row: StoredRow) -> tuple[int, str]:
    return row.facts.at if row.facts is not None else 0, row.key.id
