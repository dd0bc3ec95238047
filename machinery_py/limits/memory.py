"""Limits in this process: for tests, and the reference that the others are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

from machinery_py.connections.memory import MemoryHub
from machinery_py.limits import rules as pure
from machinery_py.limits.base import Admission, Limits, Rule, ScopeReport, Slot, stored_name
from machinery_py.limits.rules import Asking, LimitRecord, record_key, stored_slot

SWEEP = 1000  # records, from which on those that say nothing any more are looked for


class MemoryLimits(Limits):
    """Dicts under the hub's lock."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._records: dict[tuple[str, str], LimitRecord] = {}  # by scope and `record_key`
        self._changed: dict[str, tuple[Rule, ...]] = {}
        self._sweep_at = SWEEP

    def _now(self) -> int:
        return pure.micros_of(self._hub.clock.monotonic())

    def _record(self, scope: str, key: str) -> LimitRecord:
        return self._records.setdefault((scope, key), LimitRecord())

    def enter(
        self,
        scope: str,
        who: str,
        token: str,
        rules: Sequence[Rule],
        *,
        ttl: float,
        again: bool = False,
    ) -> Admission:
        asking = Asking.of(scope, who, token, rules, ttl, again)
        with self._hub.lock:
            asking = asking.under(self._changed.get(asking.scope, ()))
            records = [self._record(asking.scope, record_key(rule)) for rule in asking.rules]
            now = self._now()
            if len(self._records) > self._sweep_at:
                self._sweep(now)
            return pure.enter(records, asking, now)

    def _sweep(self, now: int) -> None:
        kept = {at: one for at, one in self._records.items() if pure.kept_until(one) > now}
        self._records, self._sweep_at = kept, max(SWEEP, 2 * len(kept))

    def renew(self, held: Sequence[Slot], *, ttl: float) -> list[bool]:
        with self._hub.lock:
            now = self._now()
            return [
                pure.renew(
                    self._record(slot.scope, record_key(slot)), slot, now, pure.micros_of(ttl)
                )
                for slot in map(stored_slot, held)
            ]

    def leave(self, held: Sequence[Slot]) -> None:
        with self._hub.lock:
            now = self._now()
            for slot in map(stored_slot, held):
                pure.leave(self._record(slot.scope, record_key(slot)), slot, now)

    def change(self, scope: str, rules: Sequence[Rule]) -> None:
        with self._hub.lock:
            self._changed[stored_name(scope)] = tuple(rules)
            if not rules:
                del self._changed[stored_name(scope)]

    def read(self) -> list[ScopeReport]:
        with self._hub.lock:
            now = self._now()
            self._sweep(now)
            by_scope: dict[str, dict[str, LimitRecord]] = {scope: {} for scope in self._changed}
            for (scope, key), record in reversed(self._records.items()):
                by_scope.setdefault(scope, {})[key] = record
            return [
                pure.report(scope, self._changed.get(scope, ()), records, now)
                for scope, records in sorted(by_scope.items())
            ]

    def close(self) -> None:
        pass  # the hub belongs to whoever made it
