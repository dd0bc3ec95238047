"""Rows in a SQLite file.

Table `rows`: connections/sqlite/schema.py.

Limits: one machine. Time is the clock's on the wall: a clock that is set ahead expires rows early.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from machinery_py.bounds import STEP_BYTES, pieces
from machinery_py.connections.sqlite.database import SQLiteDriver, Transaction
from machinery_py.connections.sqlite.fences import next_fence
from machinery_py.connections.sqlite.rows import insert_rows
from machinery_py.errors import BackendUnavailable
from machinery_py.fences import Fence
from machinery_py.rows.contract import (
    NO_ROW,
    PAGE,
    Committed,
    Conflict,
    Decision,
    Facts,
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
)
from machinery_py.texts import printable

LAST = 2**63 - 1  # µs
MOST = 100  # keys in one statement, and steps in one transaction
SWEEP = 0.01  # share of the transactions that delete expired rows
SWEPT = 1000  # of them in one transaction
T = TypeVar("T")

# In: kind, id. Out: what it says, and when the row expires. Joined by UNION ALL, this is the
# fastest way to a few rows: (kind, id) IN (VALUES …) costs twice as much.
_VERSION = "SELECT kind, id, expires_at, version FROM rows WHERE kind = ? AND id = ?"
_READ = "SELECT kind, id, expires_at, version, body, at, name FROM rows WHERE kind = ? AND id = ?"

_WRITE = "REPLACE INTO rows (kind, id, version, expires_at, at, name, body)"
# In: as _WRITE. It spares the index of listings, which a REPLACE writes also if the facts are as
# they were.
_UPDATE = """
UPDATE rows SET version = ?3, expires_at = ?4, body = ?7
WHERE kind = ?1 AND id = ?2 AND at IS ?5 AND name IS ?6
"""
_DELETE = "DELETE FROM rows WHERE kind = ? AND id = ?"

# In: kind, name or NULL, place behind which the rows begin, now, how many.
_LIST = """
SELECT kind, id, version, body, at, name FROM rows INDEXED BY rows_listed
WHERE kind = ?1 AND at IS NOT NULL AND (?2 IS NULL OR name = ?2) AND at <= ?3
    AND (at < ?3 OR id < ?4) AND (expires_at IS NULL OR expires_at > ?5)
ORDER BY at DESC, id DESC
"""

# In: now, how many.
_EXPIRE = """
DELETE FROM rows WHERE (kind, id) IN (
    SELECT kind, id FROM rows INDEXED BY rows_expiring WHERE expires_at <= ? LIMIT ?)
"""
_HAS_EXPIRED = "SELECT 1 FROM rows INDEXED BY rows_expiring WHERE expires_at <= ? LIMIT 1"


class SQLiteRows(Rows):
    """Rows in the driver's file. The driver belongs to whoever made it."""

    def __init__(self, driver: SQLiteDriver) -> None:
        self._driver = driver

    def now(self) -> int:
        return self._driver.now()

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        check_keys(keys)
        with self._driver.reading() as connection:
            return _read(connection, keys, self.now())

    def commit(self, steps: Sequence[RowStep]) -> list[StepResult]:
        for step in steps:
            check_step(step)
        if len(steps) == 1:
            return self._commit(steps)
        done: list[StepResult] = []
        for piece in pieces(steps, RowStep.size, most=MOST):
            done += self._commit(piece)
        return done

    def _commit(self, steps: Sequence[RowStep]) -> list[StepResult]:
        with self._writing(any(step.durable for step in steps)) as connection:
            now = self.now()
            done = [_carry_out(connection, step, now) for step in steps]
            _sweep(connection, now)
            return done

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """As the contract says, in one transaction: nobody else writes meanwhile."""
        check_keys(keys)
        with self._writing(durable) as connection:
            now = self.now()
            write, result = decide(_read(connection, keys, now), now)
            check_writes(write)
            _write(connection, write, now)
            _sweep(connection, now)
            return result

    def list(
        self,
        kind: str,
        *,
        name: str | None = None,
        after: StoredRow | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredRow]:
        at, id = (LAST, "")
        if after is not None and after.facts is not None:
            at, id = after.facts.at, printable(after.key.id)
        wanted = None if name is None else printable(name)
        page: list[StoredRow] = []
        left = size
        with self._driver.reading() as connection:
            found = connection.execute(_LIST, (kind, wanted, at, id, self.now()))
            with contextlib.closing(found):
                for cells in found:
                    row = _row(Key(*cells[:2]), *cells[2:])
                    left -= len(row.body)
                    if page and left < 0:
                        break
                    page.append(row)
                    if len(page) == items:
                        break
        return page

    def expire(self, items: int) -> bool:
        now = self.now()
        with self._driver.reading() as connection:
            if connection.execute(_HAS_EXPIRED, (now,)).fetchone() is None:
                return False
        with self._writing(durable=False) as connection:
            return connection.execute(_EXPIRE, (now, items)).rowcount == items

    def _writing(self, durable: bool) -> Transaction:
        begin = self._driver.transaction if durable else self._driver.claiming
        return begin(BackendUnavailable)


def _read(connection: sqlite3.Connection, keys: Sequence[Key], now: int) -> list[StoredRow | None]:
    found = _ask(connection, _READ, keys, now)
    return [
        None if (cells := found.get(_stored(key))) is None else _row(key, *cells) for key in keys
    ]


def _carry_out(connection: sqlite3.Connection, step: RowStep, now: int) -> StepResult:
    """Carry out a step, inside a transaction."""
    if step.once is not None and _ask(connection, _VERSION, [step.once], now):
        return Repeated()
    if step.expect:
        found = _ask(connection, _VERSION, list(step.expect), now)
        for key, version in step.expect.items():
            if found.get(_stored(key), [NO_ROW])[0] != version:
                return Conflict()
    if step.create:
        there = _ask(connection, _VERSION, list(step.create), now)
        new = {key: write for key, write in step.create.items() if _stored(key) not in there}
        _write(connection, new, now)
    return Committed(_write(connection, step.write, now), now)


def _write(connection: sqlite3.Connection, write: Mapping[Key, Write | None], now: int) -> Version:
    """Write the rows, and return the last version."""
    kept: list[tuple[Key, Write]] = []
    for key, one in write.items():
        if one is None:
            connection.execute(_DELETE, _stored(key))
        else:
            kept.append((key, one))
    if not kept:
        return NO_ROW
    first = next_fence(connection, now, len(kept))
    rows = [
        (*_stored(key), first + number, _end(one, now), *_columns(one.facts), one.body)
        for number, (key, one) in enumerate(kept)
    ]
    if len(rows) > 1 or not connection.execute(_UPDATE, rows[0]).rowcount:
        insert_rows(connection, _WRITE, rows)
    return Version(Fence(first + len(kept) - 1))


def _sweep(connection: sqlite3.Connection, now: int) -> None:
    if random.random() < SWEEP:
        connection.execute(_EXPIRE, (now, SWEPT))


def _end(write: Write, now: int) -> int | None:
    return None if write.expires_in is None else now + write.expires_in


def _columns(facts: Facts | None) -> tuple[int | None, str | None]:
    return (None, None) if facts is None else (facts.at, printable(facts.name))


def _row(key: Key, version: int, body: bytes, at: int | None, name: str | None) -> StoredRow:
    facts = None if at is None else Facts(at=at, name=name or "")
    return StoredRow(key=key, body=body, version=Version(Fence(version)), facts=facts)


def _stored(key: Key) -> tuple[str, str]:
    return key.kind, key.id if key.id.isascii() else printable(key.id)


def _ask(
    connection: sqlite3.Connection, sql: str, keys: Sequence[Key], now: int
) -> dict[tuple[str, str], list[Any]]:
    """Run a statement for the keys, MOST of them at a time; leave out what has expired."""
    found: dict[tuple[str, str], list[Any]] = {}
    for start in range(0, len(keys), MOST):
        cells = [cell for key in keys[start : start + MOST] for cell in _stored(key)]
        rows = connection.execute(_union(sql, len(cells) // 2), cells).fetchall()
        for kind, id, expires_at, *rest in rows:
            if expires_at is None or expires_at > now:
                found[kind, id] = rest
    return found


@functools.lru_cache(maxsize=2 * MOST)
def _union(sql: str, keys: int) -> str:
    return " UNION ALL ".join([sql] * keys)
