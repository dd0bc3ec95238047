"""Limits in this process: for tests, and the reference that the others are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from machinery_py.connections.memory import MemoryHub
from machinery_py.limits.base import Rule
from machinery_py.limits.records import RecordLimits, Work
from machinery_py.limits.rules import LimitRecord, in_use_until, micros_of

SWEEP = 1000  # records, from which on those that hold nobody back are dropped
T = TypeVar("T")


class MemoryLimits(RecordLimits):
    """Dicts under the hub's lock, which belongs to its creator."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._records: dict[tuple[str, str], LimitRecord] = {}  # by scope and key
        self._changed: dict[str, Sequence[Rule]] = {}
        self._sweep_at = SWEEP

    def _now(self) -> int:
        return micros_of(self._hub.clock.monotonic())

    def _work(self, scope: str, keys: Sequence[str], work: Work[T]) -> T:
        with self._hub.lock:
            now = self._now()
            if len(self._records) > self._sweep_at:
                left = {at: one for at, one in self._records.items() if in_use_until(one) > now}
                self._records, self._sweep_at = left, max(SWEEP, 2 * len(left))
            records = [self._records.setdefault((scope, key), LimitRecord()) for key in keys]
            return work(records, self._changed.get(scope, ()), now)

    def _set(self, scope: str, rules: Sequence[Rule]) -> None:
        with self._hub.lock:
            self._changed = {**self._changed, scope: tuple(rules)}
            if not rules:
                del self._changed[scope]

    def changed(self) -> Mapping[str, Sequence[Rule]]:
        return self._changed

    def _all(self) -> tuple[Iterable[tuple[str, str, LimitRecord]], int]:
        with self._hub.lock:
            found = [
                (*at, msgspec.structs.replace(one)) for at, one in reversed(self._records.items())
            ]
            return found, self._now()
