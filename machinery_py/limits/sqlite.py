"""Limits in a SQLite file.

Table: connections/sqlite/schema.py. A power cut may undo the last moments: limits then count a few
runs less.

Limits: one machine. Time is the clock's on the wall.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.rows import as_json, insert_rows
from machinery_py.errors import BackendUnavailable
from machinery_py.limits.base import Admission, Entrant, Rule, Slot
from machinery_py.limits.records import RecordLimits, Work, decode_record, decode_rules, encode
from machinery_py.limits.rules import LimitRecord, kept_until

OF_SCOPE = ""  # key of the row that keeps what `change` has set; those of records have a colon
SWEEP = 0.01  # share of the steps that delete what holds nobody back
FOR_EVER = 2**62
T = TypeVar("T")

# In: scope, a JSON list of keys. Out: key, body.
_LOAD = "SELECT key, body FROM limits WHERE scope = ? AND key IN (SELECT value FROM json_each(?))"
_SAVE = "REPLACE INTO limits (scope, key, body, until)"


class SQLiteLimits(RecordLimits):
    """Rows in the driver's file. The driver belongs to its creator."""

    asks_together = True

    def __init__(self, driver: SQLiteDriver) -> None:
        self._driver = driver

    def _work(self, scope: str, keys: Sequence[str], work: Work[T]) -> T:
        with self._driver.claiming(BackendUnavailable) as connection:
            now = self._driver.now()
            found = dict(connection.execute(_LOAD, (scope, as_json([OF_SCOPE, *keys]))).fetchall())
            changed = decode_rules(found[OF_SCOPE]) if OF_SCOPE in found else ()
            records = [decode_record(found[key]) if key in found else LimitRecord() for key in keys]
            result = work(records, changed, now)
            rows = [
                (scope, key, encode(record), kept_until(record, now))
                for key, record in zip(keys, records, strict=True)
            ]
            insert_rows(connection, _SAVE, rows)
            if random.random() < SWEEP:
                connection.execute("DELETE FROM limits WHERE until <= ?", (now,))
            return result

    def enter_all(self, entrants: Sequence[Entrant]) -> list[Admission]:
        with self._driver.claiming(BackendUnavailable):  # one step for all
            return super().enter_all(entrants)

    def renew(self, held: Sequence[Slot], *, ttl: float) -> list[bool]:
        with self._driver.claiming(BackendUnavailable):
            return super().renew(held, ttl=ttl)

    def leave(self, held: Sequence[Slot]) -> None:
        with self._driver.claiming(BackendUnavailable):
            super().leave(held)

    def _set(self, scope: str, rules: Sequence[Rule]) -> None:
        with self._driver.transaction(BackendUnavailable) as connection:
            if rules:
                insert_rows(connection, _SAVE, [(scope, OF_SCOPE, encode(rules), FOR_EVER)])
            else:
                connection.execute("DELETE FROM limits WHERE scope = ? AND key = ''", (scope,))

    def changed(self) -> Mapping[str, Sequence[Rule]]:
        with self._driver.reading() as connection:
            found = connection.execute(
                "SELECT scope, body FROM limits WHERE until = ?", (FOR_EVER,)
            )
            return {scope: decode_rules(body) for scope, body in found.fetchall()}

    def _all(self) -> tuple[Iterable[tuple[str, str, LimitRecord]], int]:
        now = self._driver.now()
        with self._driver.reading() as connection:
            rows = connection.execute(
                "SELECT scope, key, body FROM limits WHERE until > ? ORDER BY until DESC", (now,)
            ).fetchall()
        return [(scope, key, decode_record(body)) for scope, key, body in rows if key], now
