"""Limits as rows: one row for each limited key, one for each scope that was changed at run time.

A power cut may undo the last moments: limits then count a few runs less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from machinery_py.limits.rules import Asking, LimitRecord, kept_until
from machinery_py.rows.contract import Facts, Key, Rows, RowStep, StoredRow, Write

RECORD, RULES = "limit", "limit rules"  # kinds
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
        places = [[Key(RECORD, f"{job.scope}\n{key}") for key in job.keys] for job in jobs]
        names = list(dict.fromkeys(name for some in places for name in some))
        scopes = list(dict.fromkeys(job.scope for job in jobs))

        def decide(
            rows: Sequence[StoredRow | None], now: int
        ) -> tuple[Mapping[Key, Write | None], list[T]]:
            records = dict(zip(names, map(_record, rows), strict=False))
            changed = dict(zip(scopes, map(_rules, rows[len(names) :]), strict=True))
            results = [
                job.work([records[name] for name in some], changed[job.scope], now)
                for job, some in zip(jobs, places, strict=True)
            ]
            return {name: _kept(record, now) for name, record in records.items()}, results

        keys = [*names, *(Key(RULES, scope) for scope in scopes)]
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
    return Write(body=encode(record), expires_in=kept_until(record, now) - now, facts=Facts(at=now))
