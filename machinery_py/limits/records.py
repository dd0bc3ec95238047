"""Bases of the stores of limits.

AskedLimits   brings what is asked into the names that are stored
RecordLimits  loads some records of one scope, has them changed by the pure rules (rules.py), and
              keeps them; nobody else may change these records meanwhile
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from machinery_py.limits import rules as pure
from machinery_py.limits.base import (
    Admission,
    Entrant,
    Limits,
    Rule,
    ScopeReport,
    Slot,
    stored_name,
)
from machinery_py.limits.rules import Asking, LimitRecord, record_key, stored_slot

T = TypeVar("T")
#: Changes the records, in the order of their keys; gets what `change` has set, and the time in µs.
Work = Callable[[Sequence[LimitRecord], Sequence[Rule], int], T]

encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(LimitRecord).decode
decode_rules = msgspec.msgpack.Decoder(tuple[Rule, ...]).decode


class AskedLimits(Limits):
    """Base of a store whose connections belong to whoever made them."""

    @abstractmethod
    def _enter(self, asking: Asking) -> Admission:
        """Carry out `enter`."""

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
        one = Entrant(scope=scope, who=who, token=token, rules=rules, ttl=ttl, again=again)
        return self._enter(Asking.of(one))

    def close(self) -> None:
        pass


class RecordLimits(AskedLimits):
    """Base of a store whose records are changed by the pure rules."""

    @abstractmethod
    def _work(self, scope: str, keys: Sequence[str], work: Work[T]) -> T:
        """Do the work on the records of these keys (`record_key`), as one step."""

    @abstractmethod
    def _set(self, scope: str, rules: Sequence[Rule]) -> None:
        """Keep what `change` has set; no rules: nothing."""

    @abstractmethod
    def _all(self) -> tuple[Iterable[tuple[str, str, LimitRecord]], int]:
        """Return all records by scope and key, the newest first, and the time."""

    def _enter(self, asking: Asking) -> Admission:
        def work(records: Sequence[LimitRecord], changed: Sequence[Rule], now: int) -> Admission:
            return pure.enter(records, asking.under(changed), now)

        return self._work(asking.scope, list(map(record_key, asking.rules)), work)

    def renew(self, held: Sequence[Slot], *, ttl: float) -> list[bool]:
        return [self._renew(slot, pure.micros_of(ttl)) for slot in map(stored_slot, held)]

    def _renew(self, slot: Slot, ttl: int) -> bool:
        return self._work(
            slot.scope,
            [record_key(slot)],
            lambda records, _, now: pure.renew(records[0], slot, now, ttl),
        )

    def leave(self, held: Sequence[Slot]) -> None:
        for slot in map(stored_slot, held):
            self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        self._work(
            slot.scope,
            [record_key(slot)],
            lambda records, _, now: pure.leave(records[0], slot, now),
        )

    def change(self, scope: str, rules: Sequence[Rule]) -> None:
        self._set(stored_name(scope), rules)

    def read(self) -> list[ScopeReport]:
        changed = self.changed()
        records, now = self._all()
        scopes: dict[str, dict[str, LimitRecord]] = {scope: {} for scope in changed}
        for scope, key, record in records:
            scopes.setdefault(scope, {})[key] = record
        reports = [
            pure.report(scope, changed.get(scope, ()), found, now)
            for scope, found in sorted(scopes.items())
        ]
        return [one for one in reports if one.changed or one.usage]
