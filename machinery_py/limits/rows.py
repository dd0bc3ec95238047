"""Limits as rows: one row for each limited key, one for each scope that was changed at run time.

A power cut may undo the last moments: limits then count a few runs less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from machinery_py.limits.base import Admission, Entrant, Rule, Slot
from machinery_py.limits.records import (
    RecordJob,
    RecordLimits,
    decode_record,
    decode_rules,
    encode,
    entering,
    leaving,
    renewing,
)
from machinery_py.limits.rules import SECOND, Asking, LimitRecord, kept_until
from machinery_py.rows.contract import Facts, Key, Rows, RowStep, StoredRow, Write

RECORD, RULES = "limit", "limit rules"  # kinds
LISTED = 60 * SECOND  # records are listed by the minute: most writes then leave the listing alone
T = TypeVar("T")


class RowsLimits(RecordLimits):
    """Rows of a store, which belongs to whoever made it."""

    asks_together = True

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def _work(self, job: RecordJob[T]) -> T:
        return self._work_all([job])[0]

    def enter_all(self, entrants: Sequence[Entrant]) -> list[Admission]:
        return self._work_all([entering(Asking.of(one)) for one in entrants])

    def renew(self, held: Sequence[Slot], *, ttl: float) -> list[bool]:
        return self._work_all([renewing(slot, ttl) for slot in held])

    def leave(self, held: Sequence[Slot]) -> None:
        self._work_all(list(map(leaving, held)))

    def _work_all(self, jobs: Sequence[RecordJob[T]]) -> list[T]:
        """Do the jobs one after the other, as one step: each record is read and written once."""
        if not jobs:
            return []
        names = [[Key(RECORD, f"{job.scope}\n{key}") for key in job.keys] for job in jobs]
        rules = [Key(RULES, job.scope) for job in jobs]
        keys = list(dict.fromkeys(chain(rules, *names)))

        def decide(
            rows: Sequence[StoredRow | None], now: int
        ) -> tuple[Mapping[Key, Write | None], list[T]]:
            found = dict(zip(keys, rows, strict=True))
            records: dict[Key, LimitRecord] = {}
            results: list[T] = []
            for job, some, of_scope in zip(jobs, names, rules, strict=True):
                for name in some:
                    if name not in records:
                        records[name] = _record(found[name])
                changed = _rules(found[of_scope])
                results.append(job.work([records[name] for name in some], changed, now))
            return {name: _kept(record, now) for name, record in records.items()}, results

        return self._rows.change(keys, decide, durable=False)

    def _set(self, scope: str, rules: Sequence[Rule]) -> None:
        write = Write(body=encode(rules), facts=Facts(at=0)) if rules else None
        self._rows.commit([RowStep(write={Key(RULES, scope): write})])

    def changed(self) -> Mapping[str, Sequence[Rule]]:
        return {row.key.id: decode_rules(row.body) for row in self._rows.list_all(RULES)}

    def _all(self) -> tuple[Iterable[tuple[str, str, LimitRecord]], int]:
        records: list[tuple[str, str, LimitRecord]] = []
        for row in self._rows.list_all(RECORD):
            scope, _, key = row.key.id.partition("\n")
            records.append((scope, key, decode_record(row.body)))
        return records, self._rows.now()


def _record(row: StoredRow | None) -> LimitRecord:
    return LimitRecord() if row is None else decode_record(row.body)


def _rules(row: StoredRow | None) -> Sequence[Rule]:
    return () if row is None else decode_rules(row.body)


def _kept(record: LimitRecord, now: int) -> Write:
    ends_in, facts = kept_until(record, now) - now, Facts(at=now // LISTED * LISTED)
    return Write(body=encode(record), expires_in=ends_in, facts=facts)
