"""Rows and messages in a SQLite file.

Tables: connections/sqlite/schema.py.

Limits: one machine. Time is the clock's on the wall: a clock that is set ahead expires rows early.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from machinery_py.bounds import STEP_BYTES, pieces
from machinery_py.connections.sqlite.database import SQLiteDriver, Transaction
from machinery_py.connections.sqlite.errors import Unavailable
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
    Gone,
    Key,
    NoRoom,
    Repeated,
    RowStep,
    StepResult,
    StoredRow,
    Version,
    Write,
    check_keys,
    check_writes,
)
from machinery_py.rows.messages import (
    EVER,
    Join,
    MessageRows,
    MessageStep,
    check_message_step,
    of_rows,
)
from machinery_py.rows.sqlite_messages import Moves, SQLiteMessages, count_waiting
from machinery_py.texts import printable

LAST = 2**63 - 1  # µs
MOST = 100  # keys in one statement, and steps in one transaction
SWEEP = 0.01  # share of the transactions that delete expired rows
SWEPT = 1000  # of them in one transaction
AGAIN = 60_000_000  # µs until a row that another one keeps is looked at again
T = TypeVar("T")

# In: kind, id. Out: what it says, when the row expires, and what keeps it. Joined by UNION ALL,
# this is the fastest way to a few rows: (kind, id) IN (VALUES …) costs twice as much.
_VERSION = (
    "SELECT kind, id, expires_at, kept_kind, kept_id, version FROM rows WHERE kind = ? AND id = ?"
)
_READ = _VERSION.replace("version", "version, body, at, name")

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
        self.clock = driver.clock
        self._unavailable = unavailable
        self._seen: dict[Key, int] | None = None

    def is_entered(self) -> bool:
        return self.driver.is_entered()

    def now(self) -> int:
        return self.driver.now()

    def fences(self, number: int) -> Fence:
        with self._writing(durable=False) as connection:
            return next_fence(connection, self.now(), number)

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        check_keys(keys)
        with self.driver.reading() as connection:
            rows = _read(connection, keys, self.now())
        if self._seen is not None and self.is_entered():
            for key, row in zip(keys, rows, strict=True):
                self._seen[key] = NO_ROW if row is None else row.version
        return rows

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a transaction. The first commit in it knows the versions that were read in it."""
        with self._writing(durable=True):
            self._seen = {}
            try:
                yield
            finally:
                self._seen = None

    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        whole = [one if isinstance(one, MessageStep) else of_rows(one) for one in steps]
        for step in whole:
            check_message_step(step)
        done: list[StepResult] = []
        for piece in pieces(whole, _size, most=MOST):
            durable = any(step.durable for step in piece)
            with self._writing(durable) as connection:
                seen, self._seen = self._seen or {}, None
                batch = _Batch(self.driver, connection, piece, seen)
                done += [batch.refusal(step) or batch.carry_out(step) for step in piece]
                batch.write()
        return done

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """As the contract says, in one transaction: nobody else writes meanwhile."""
        check_keys(keys)
        with self._writing(durable) as connection:
            now = self.now()
            write, result = decide(_read(connection, keys, now), now)
            check_writes(write)
            if write:
                step = MessageStep(write=dict(write))
                batch = _Batch(self.driver, connection, [step], {})
                batch.carry_out(step)
                batch.write()
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


class _Batch:
    """Steps of one transaction: read together, decided one after the other, written together.

    Each statement lets other threads run, perhaps for milliseconds, while all others wait for the
    transaction. So their number does not grow with that of the steps.
    """

    def __init__(
        self,
        driver: SQLiteDriver,
        connection: sqlite3.Connection,
        steps: Sequence[MessageStep],
        seen: Mapping[Key, int],
    ) -> None:
        self._connection = connection
        self._now = driver.now()
        self._moves = Moves(driver, connection, steps, self._now)
        asked: dict[Key, None] = {}
        self._left = 0  # versions that are reserved
        for step in steps:
            self._left += len(step.write) + 4 * len(step.joins)
            if step.once is not None:
                asked[step.once] = None
            if step.expect:
                asked.update(dict.fromkeys(step.expect))
            if step.create:
                asked.update(dict.fromkeys(step.create))
            for join in step.joins:
                asked[join.set] = asked[join.ready] = None
        self._versions = {key: version for key, version in seen.items() if version != NO_ROW}
        if new := [key for key in asked if key not in seen]:
            found = _ask(connection, _VERSION, new, self._now)
            self._versions |= {key: found[at][0] for key in new if (at := _stored(key)) in found}
        self._next = Fence(0)
        if self._left:
            self._next = next_fence(connection, self._now, self._left)
        self._rows: dict[Key, Cells | None] = {}
        self._sizes: dict[Key, int] = {}

    def refusal(self, step: MessageStep) -> StepResult | None:
        """Return why the step is not to be carried out."""
        versions = self._versions
        if step.once is not None and step.once in versions:
            return Repeated()
        for key, version in step.expect.items():
            if versions.get(key, NO_ROW) != version:
                return Conflict()
        if not (self._moves.are_there(step.takes) and self._moves.are_there(step.held)):
            return Gone()
        for room in step.room:
            self._moves.write()
            waiting = count_waiting(self._connection, room.queue)
            if waiting + room.adds > room.limit:
                return NoRoom(room.queue, waiting)
        return None

    def carry_out(self, step: MessageStep) -> Committed:
        for key, new in step.create.items():
            if key not in self._versions:
                self._put(key, new)
        given = NO_ROW
        for key, one in step.write.items():
            if one is None:
                self._versions.pop(key, None)
                self._rows[key] = None
            else:
                given = self._put(key, one)
        for join in step.joins:
            self._join(join)
        if step.takes or step.pushes or step.tell:
            self._moves.add(step)
        return Committed(given, self._now)

    def _put(self, key: Key, write: Write) -> Version:
        if not self._left:
            self._left, self._next = 1, next_fence(self._connection, self._now)
        version = self._next
        self._left, self._next = self._left - 1, Fence(version + 1)
        self._versions[key] = version
        facts, kept = write.facts, write.kept_by
        ends = None if write.expires_in is None else self._now + write.expires_in
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
        return Version(version)

    def _join(self, join: Join) -> None:
        """Add a member to a set, whose row says how many there are."""
        if join.ready in self._versions:
            return
        at, size = _stored(join.set), self._sizes.get(join.set, 0)
        if join.set not in self._versions:
            self._connection.execute(_NO_MEMBERS, at)
            size = 0
        elif not size:
            [row] = _read(self._connection, [join.set], self._now)
            size = 0 if row is None else int(row.body)
        if self._connection.execute(_JOIN, (*at, printable(join.member))).rowcount:
            self._sizes[join.set] = size = size + 1
            self._put(join.set, Write(body=b"%d" % size))
            for key, write in join.beside.items():
                self._put(key, write)
            if size >= join.whole:
                self._put(join.ready, join.write)

    def write(self) -> None:
        """Write what the steps came to."""
        self._moves.write()
        rows = [cells for cells in self._rows.values() if cells is not None]
        gone = [_stored(key) for key, cells in self._rows.items() if cells is None]
        if gone:
            self._connection.executemany(_DELETE, gone)
        if rows and (len(rows) > 1 or not self._connection.execute(_UPDATE, rows[0]).rowcount):
            insert_rows(self._connection, _WRITE, rows, _OVER_IT)
        if random.random() < SWEEP:
            _expire(self._connection, self._now, SWEPT)


def _expire(connection: sqlite3.Connection, now: int, items: int) -> int:
    """Delete expired rows; return how many were looked at, at most."""
    kept = connection.execute(_PUT_OFF, (now, items, now + AGAIN)).rowcount
    return kept + connection.execute(_EXPIRE, (now, items - kept)).rowcount


def _size(step: MessageStep) -> int:
    size = 0
    for write in (*step.create.values(), *step.write.values()):
        if write is not None:
            size += len(write.body)
    for push in step.pushes:
        if push.body is not None:
            size += len(push.body)
    return size


def _read(connection: sqlite3.Connection, keys: Sequence[Key], now: int) -> list[StoredRow | None]:
    found = _ask(connection, _READ, keys, now)
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
    connection: sqlite3.Connection, sql: str, keys: Sequence[Key], now: int
) -> dict[tuple[str, str], Sequence[Any]]:
    """Run a statement for the keys, MOST of them at a time; leave out what has expired."""
    found: dict[tuple[str, str], Sequence[Any]] = {}
    for start in range(0, len(keys), MOST):
        cells = [cell for key in keys[start : start + MOST] for cell in _stored(key)]
        rows = connection.execute(_union(sql, len(cells) // 2), cells).fetchall()
        for kind, id, expires_at, kept_kind, kept_id, *rest in rows:
            if (
                expires_at is None
                or expires_at > now
                or (
                    kept_kind is not None
                    and _ask(connection, _VERSION, [Key(kept_kind, kept_id)], now)
                )
            ):
                found[kind, id] = (*rest, kept_kind, kept_id)
    return found


@functools.lru_cache(maxsize=2 * MOST)
def _union(sql: str, keys: int) -> str:
    return " UNION ALL ".join([sql] * keys)
