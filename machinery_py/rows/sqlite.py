"""Rows and messages in a SQLite file.

Tables: connections/sqlite/schema.py.

Limits: one machine. Time is the clock's on the wall: a clock that is set ahead expires rows early.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from machinery_py.bounds import STEP_BYTES, pieces
from machinery_py.clock import Clock
from machinery_py.connections.sqlite.database import SQLiteDriver, Transaction
from machinery_py.connections.sqlite.errors import Unavailable
from machinery_py.connections.sqlite.fences import next_fence
from machinery_py.connections.sqlite.rows import insert_rows
from machinery_py.errors import BackendUnavailable
from machinery_py.fences import Fence
from machinery_py.rows.contract import (
    NO_ROW,
    PAGE,
    Decision,
    Facts,
    Key,
    RowStep,
    StepResult,
    StoredRow,
    Version,
    Write,
    check_writes,
)
from machinery_py.rows.messages import EVER, MessageRows, MessageStep, checked
from machinery_py.rows.sqlite_messages import Moves, SQLiteMessages
from machinery_py.texts import printable

LAST = 2**63 - 1  # µs
MOST = 100  # keys in one statement, and steps in one transaction
SWEEP = 0.01  # share of the transactions that delete expired rows
SWEPT = 1000  # of them in one transaction
AGAIN = 60_000_000  # µs until a row that another one keeps is looked at again
T = TypeVar("T")

_WRITE = (
    "INSERT INTO rows (kind, id, version, expires_at, at, name, body, kept_kind, kept_id, sweep_at)"
)
# Not REPLACE: the row stays where it is, and so does its entry among the ids.
_OVER_IT = """
ON CONFLICT (kind, id) DO UPDATE SET version = excluded.version, expires_at = excluded.expires_at,
    at = excluded.at, name = excluded.name, body = excluded.body, kept_kind = excluded.kept_kind,
    kept_id = excluded.kept_id, sweep_at = excluded.sweep_at
"""
# In: as _WRITE. It spares the index of listings, which the other writes also if the facts are
# as they were.
_UPDATE = """
UPDATE rows SET version = ?3, expires_at = ?4, body = ?7, kept_kind = ?8, kept_id = ?9,
    sweep_at = ?10
WHERE kind = ?1 AND id = ?2 AND at IS ?5 AND name IS ?6
"""
_DELETE = "DELETE FROM rows WHERE kind = ? AND id = ?"

# In: now. Whether a row is there.
_THERE = """
(expires_at IS NULL OR expires_at > {0} OR (kept_kind IS NOT NULL AND EXISTS (
    SELECT 1 FROM rows AS keeper WHERE keeper.kind = rows.kept_kind AND keeper.id = rows.kept_id
    AND (keeper.expires_at IS NULL OR keeper.expires_at > {0}))))
"""

# In: kind, name or NULL, place behind which the rows begin, now, how many.
_LIST = f"""
SELECT kind, id, version, body, at, name, kept_kind, kept_id FROM rows INDEXED BY rows_listed
WHERE kind = ?1 AND at IS NOT NULL AND (?2 IS NULL OR name = ?2) AND at <= ?3
    AND (at < ?3 OR id < ?4) AND {_THERE.format("?5")}
ORDER BY at DESC, id DESC
"""
# In: kind, beginning, end, now, how many.
_IDS = f"""
SELECT id FROM rows WHERE kind = ?1 AND id >= ?2 AND id < ?3 AND {_THERE.format("?4")}
ORDER BY id LIMIT ?5
"""
# In: kind, now, since, step.
_COUNT = f"""
SELECT name, at - at % ?4 AS step, count(*) FROM rows INDEXED BY rows_listed
WHERE kind = ?1 AND at IS NOT NULL AND at >= ?3 AND {_THERE.format("?2")} GROUP BY step, name
"""

# In: now, how many, when to look again.
_OVER = "SELECT rowid FROM rows INDEXED BY rows_expiring WHERE sweep_at <= ?1 LIMIT ?2"
_PUT_OFF = f"""
UPDATE rows SET sweep_at = ?3 WHERE rowid IN ({_OVER}) AND kept_kind IS NOT NULL
    AND {_THERE.format("?1")}
"""
_EXPIRE = f"DELETE FROM rows WHERE rowid IN ({_OVER})"

_JOIN = "INSERT OR IGNORE INTO members VALUES (?, ?, ?)"
_NO_MEMBERS = "DELETE FROM members WHERE kind = ? AND id = ?"

Cells = tuple[Any, ...]


class SQLiteRows(SQLiteMessages, MessageRows):
    """Rows in the driver's file. The driver belongs to whoever made it.

    Args:
        unavailable: what is raised while others keep the file busy.
    """

    def __init__(
        self, driver: SQLiteDriver, *, unavailable: Unavailable = BackendUnavailable
    ) -> None:
        super().__init__(driver)
        self.clock: Clock = driver.clock
        self._unavailable = unavailable
        self._seen: dict[Key, Version] | None = None

    def is_entered(self) -> bool:
        return self.driver.is_entered()

    def now(self) -> int:
        return self.driver.now()

    def fences(self, number: int) -> Fence:
        with self._writing(durable=False) as connection:
            return next_fence(connection, self.now(), number)

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        with self.driver.reading() as connection:
            rows = _read(connection, keys, self.now())
        if self._seen is not None and self.is_entered():
            for key, row in zip(keys, rows, strict=True):
                self._seen[key] = NO_ROW if row is None else row.version
        return rows

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a transaction, which knows the versions that were read in it."""
        with self._writing(durable=True):
            self._seen = {}
            try:
                yield
            finally:
                self._seen = None

    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        whole = list(map(checked, steps))
        done: list[StepResult] = []
        for piece in pieces(whole, MessageStep.size, most=MOST):
            with self._writing(any(step.durable for step in piece)) as connection:
                done += self._carry_out(connection, piece)
        return done

    def _carry_out(
        self, connection: sqlite3.Connection, steps: Sequence[MessageStep]
    ) -> list[StepResult]:
        batch = _Batch(self.driver, connection, steps, {} if self._seen is None else self._seen)
        done = [batch.carry_out(step) for step in steps]
        batch.write()
        return done

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """As the contract says, in one transaction: nobody else writes meanwhile."""
        with self._writing(durable) as connection:
            now = self.now()
            write, result = decide(_read(connection, keys, now), now)
            check_writes(write)
            if write:
                self._carry_out(connection, [MessageStep(write=dict(write))])
            return result

    def ids(self, kind: str, *, prefix: str = "", items: int = PAGE) -> list[str]:
        begin = printable(prefix)
        with self.driver.reading() as connection:
            what = (kind, begin, begin + chr(0x10FFFF), self.now(), items)
            return [id for (id,) in connection.execute(_IDS, what)]

    def count(self, kind: str, *, since: int = 0, step: int = EVER) -> dict[tuple[str, int], int]:
        with self.driver.reading() as connection:
            found = connection.execute(_COUNT, (kind, self.now(), since, step))
            return {(name, begun_at): number for name, begun_at, number in found}

    def expire(self, items: int) -> bool:
        now = self.now()
        with self.driver.reading() as connection:
            if connection.execute(_OVER, (now, 1)).fetchone() is None:
                return False
        with self._writing(durable=False) as connection:
            return _expire(connection, now, items) == items

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
        with self.driver.reading() as connection:
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

    def _writing(self, durable: bool) -> Transaction:
        begin = self.driver.transaction if durable else self.driver.claiming
        return begin(self._unavailable)


class _Batch(Moves):
    """Steps of one transaction: read together, decided one after the other, written together.

    Each statement lets other threads run, perhaps for milliseconds, while all others wait for the
    transaction. So their number does not grow with that of the steps.

    Args:
        versions: those that are known; it is kept up to date.
    """

    def __init__(
        self,
        driver: SQLiteDriver,
        connection: sqlite3.Connection,
        steps: Sequence[MessageStep],
        versions: dict[Key, Version],
    ) -> None:
        super().__init__(driver, connection, steps)
        self._versions = versions
        self._rows: dict[Key, Cells | None] = {}
        self._sizes: dict[Key, int] = {}
        written = 0
        asked: dict[Key, None] = {}
        for step in steps:
            written += len(step.write) + len(step.create)
            if step.once is not None:
                asked[step.once] = None
            asked.update(dict.fromkeys(step.expect))
            asked.update(dict.fromkeys(step.create))
            for join in step.joins:
                written += 2 + len(join.beside)
                asked[join.set] = asked[join.ready] = None
        if new := [key for key in asked if key not in versions]:
            found = _ask(connection, "version", new, self.moment)
            for key in new:
                there = found.get(_stored(key))
                versions[key] = NO_ROW if there is None else there[0]
        if written:
            self._next = next_fence(connection, self.moment, written)

    def version_of(self, key: Key) -> Version:
        return self._versions[key]

    def put(self, key: Key, write: Write) -> Version:
        self._versions[key] = version = Version(self._next)
        self._next = Fence(version + 1)
        facts, kept = write.facts, write.kept_by
        ends = None if write.expires_in is None else self.moment + write.expires_in
        self._rows[key] = (
            *_stored(key),
            version,
            ends,
            None if facts is None else facts.at,
            None if facts is None else printable(facts.name),
            write.body,
            *((None, None) if kept is None else _stored(kept)),
            ends,
        )
        return version

    def delete(self, key: Key) -> None:
        self._versions[key] = NO_ROW
        self._rows[key] = None

    def add_member(self, set: Key, member: str) -> int:
        at = _stored(set)
        size = self._sizes.get(set, 0)
        if self._versions[set] == NO_ROW:
            self._connection.execute(_NO_MEMBERS, at)
            size = 0
        elif not size:
            [row] = _read(self._connection, [set], self.moment)
            size = 0 if row is None else int(row.body)
        if not self._connection.execute(_JOIN, (*at, printable(member))).rowcount:
            return 0
        self._sizes[set] = size + 1
        return size + 1

    def write(self) -> None:
        """Write what the steps came to."""
        super().write()
        rows = [cells for cells in self._rows.values() if cells is not None]
        gone = [_stored(key) for key, cells in self._rows.items() if cells is None]
        if gone:
            self._connection.executemany(_DELETE, gone)
        if rows and (len(rows) > 1 or not self._connection.execute(_UPDATE, rows[0]).rowcount):
            insert_rows(self._connection, _WRITE, rows, _OVER_IT)
        if random.random() < SWEEP:
            _expire(self._connection, self.moment, SWEPT)


def _expire(connection: sqlite3.Connection, now: int, items: int) -> int:
    """Delete expired rows; return how many were looked at, at most."""
    kept = connection.execute(_PUT_OFF, (now, items, now + AGAIN)).rowcount
    return kept + connection.execute(_EXPIRE, (now, items - kept)).rowcount


def _read(connection: sqlite3.Connection, keys: Sequence[Key], now: int) -> list[StoredRow | None]:
    found = _ask(connection, "version, body, at, name", keys, now)
    return [
        None if (cells := found.get(_stored(key))) is None else _row(key, *cells) for key in keys
    ]


def _row(
    key: Key,
    version: int,
    body: bytes,
    at: int | None,
    name: str | None,
    kept_kind: str | None,
    kept_id: str | None,
) -> StoredRow:
    return StoredRow(
        key=key,
        body=body,
        version=Version(Fence(version)),
        facts=None if at is None else Facts(at=at, name=name or ""),
        kept_by=None if kept_kind is None else Key(kept_kind, kept_id or ""),
    )


def _stored(key: Key) -> tuple[str, str]:
    return key.kind, key.id if key.id.isascii() else printable(key.id)


def _ask(
    connection: sqlite3.Connection, columns: str, keys: Sequence[Key], now: int
) -> dict[tuple[str, str], Sequence[Any]]:
    """Return these columns of the rows, and what keeps each; leave out what has expired."""
    found: dict[tuple[str, str], Sequence[Any]] = {}
    for start in range(0, len(keys), MOST):
        kinds: dict[str, list[str]] = {}
        for key in keys[start : start + MOST]:
            kind, id = _stored(key)
            kinds.setdefault(kind, [kind]).append(id)
        sql = _select(columns, *map(len, kinds.values()))
        rows = connection.execute(sql, [cell for cells in kinds.values() for cell in cells])
        for kind, id, expires_at, kept_kind, kept_id, *rest in rows.fetchall():
            if (
                expires_at is None
                or expires_at > now
                or (
                    kept_kind is not None
                    and _ask(connection, "version", [Key(kept_kind, kept_id)], now)
                )
            ):
                found[kind, id] = (*rest, kept_kind, kept_id)
    return found


@functools.lru_cache(maxsize=2 * MOST)
def _select(columns: str, *sizes: int) -> str:
    """Return a statement for rows of several kinds, which gets of each the kind and the ids."""
    head = f"SELECT kind, id, expires_at, kept_kind, kept_id, {columns} FROM rows"
    return " UNION ALL ".join(
        f"{head} WHERE kind = ? AND id IN ({','.join('?' * (size - 1))})" for size in sizes
    )
