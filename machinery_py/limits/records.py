"""Bases of the stores of limits.

AskedLimits   brings what is asked into the names that are stored
RecordLimits  loads some records of one scope, has them changed by the pure rules (rules.py), and
              keeps them; nobody else may change these records meanwhile
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

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


class RecordJob(NamedTuple, Generic[T]):
    """A change of some records of one scope.

    Attributes:
        keys: of the records (`record_key`).
        work: changes the records, in the order of their keys; gets what `change` has set, and the
            time in µs.
    """

    scope: str
    keys: Sequence[str]
    work: Callable[[Sequence[LimitRecord], Sequence[Rule], int], T]


encode: Final = msgspec.msgpack.Encoder().encode
decode_record: Final = msgspec.msgpack.Decoder(LimitRecord).decode
decode_rules: Final = msgspec.msgpack.Decoder(tuple[Rule, ...]).decode


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

    def enter_all(self, entrants: Sequence[Entrant]) -> list[Admission]:
        return [self._enter(Asking.of(one)) for one in entrants]

    def close(self) -> None:
        pass


class RecordLimits(AskedLimits):
    """Base of a store whose records are changed by the pure rules."""

    @abstractmethod
    def _work(self, job: RecordJob[T]) -> T:
        """Do the job as one step."""

    @abstractmethod
    def _set(self, scope: str, rules: Sequence[Rule]) -> None:
        """Keep what `change` has set; no rules: nothing."""

    @abstractmethod
    def _all(self) -> tuple[Iterable[tuple[str, str, LimitRecord]], int]:
        """Return all records by scope and key, the newest first, and the time."""

    def _enter(self, asking: Asking) -> Admission:
        return self._work(entering(asking))

    def renew(self, held: Sequence[Slot], *, ttl: float) -> list[bool]:
        return [self._work(renewing(slot, ttl)) for slot in held]

    def leave(self, held: Sequence[Slot]) -> None:
        for slot in held:
            self._work(leaving(slot))

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


def entering(asking: Asking) -> RecordJob[Admission]:
    """Return the job of `Limits.enter`."""
    return RecordJob(
        asking.scope,
        list(map(record_key, asking.rules)),
        lambda records, changed, now: pure.enter(records, asking.under(changed), now),
    )


def renewing(held: Slot, ttl: float) -> RecordJob[bool]:
    """Return the job of `Limits.renew` for one slot."""
    slot, length = stored_slot(held), pure.micros_of(ttl)
    return RecordJob(
        slot.scope,
        [record_key(slot)],
        lambda records, _, now: pure.renew(records[0], slot, now, length),
    )


def leaving(held: Slot) -> RecordJob[None]:
    """Return the job of `Limits.leave` for one slot."""
    slot = stored_slot(held)
    return RecordJob(
        slot.scope, [record_key(slot)], lambda records, _, now: pure.leave(records[0], slot, now)
    )
