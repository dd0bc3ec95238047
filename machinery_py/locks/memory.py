"""Locks in this process, with those of Go's eager mode.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

from machinery_py.locks.base import GoLock
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.memory import MemoryRows


class MemoryLock(RowsLock):
    """Locks as rows in memory."""

    def __init__(self, rows: MemoryRows) -> None:
        super().__init__(rows)
        self._go = MemoryGoLock(rows)

    def go(self) -> MemoryGoLock:
        return self._go


class MemoryGoLock(GoLock):
    """Go's eager lock."""

    def __init__(self, rows: MemoryRows) -> None:
        self._rows = rows
        self._until: dict[str, int] = {}

    def lock(self, key: str, until: int) -> bool:
        with self._rows.lock:
            now = round(self._rows.clock.now().timestamp() * 1e6) * 1000
            if self._until.get(key, -1) >= now:
                return False
            self._until = {one: end for one, end in self._until.items() if end >= now}
            self._until[key] = until - 1
            return True
