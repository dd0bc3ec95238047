"""States and groups in a SQLite file.

Tables: connections/sqlite/schema.py.

A chord's finished member is kept until the chord is settled, unless no member arrives for a week.

Limits: one machine. Every commit that finishes tasks wakes all waiters; each looks for its own.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Collection, Iterable, Sequence

from machinery_py.backends.base import (
    REVOKED_LIFE,
    BackendFeatures,
    Change,
    ReadyGroup,
    Records,
    Rider,
    Verdict,
)
from machinery_py.backends.listings import Count, Listing, Place, counts_of
from machinery_py.backends.sqlite.listener import READ, SQLiteListener
from machinery_py.backends.sqlite.rows import (
    ALL,
    AWAITED,
    LOAD,
    SAVE,
    SAVE_OVER,
    STANDS,
    STATE,
    decode_bodies,
    decode_loaded,
    encode_bodies,
    plain,
    record_of,
    state_of,
)
from machinery_py.backends.transactional import Row, TransactionalBackend
from machinery_py.clock import micros, moment_of
from machinery_py.connections.sqlite.database import SQLiteDriver, Transaction
from machinery_py.connections.sqlite.fences import next_fence
from machinery_py.connections.sqlite.rows import Rows, as_json, insert_rows
from machinery_py.errors import BackendUnavailable
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.texts import printable

EXPIRE_IN = 3600.0  # seconds that a finished task is kept
CHORD_LIFE = 7 * 86400.0  # seconds without an arrival until a chord is taken for broken
SWEEP = 60.0  # seconds between two looks for what has expired
BATCH = 1000  # rows deleted in one step, so that nobody waits long for the file
LOOK = 20_000  # states that one step of a listing looks at
LAST = 2**63 - 1  # µs

# In: group, created_at, ttl, locked, fired, kept until, plan. Completes a row that an arrival made.
_ADD_GROUP = """
INSERT INTO groups (uuid, created_at, ttl, locked, fired, expires_at, plan)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (uuid) DO UPDATE SET created_at = excluded.created_at, ttl = excluded.ttl,
    locked = excluded.locked WHERE NOT EXISTS (
    SELECT 1 FROM group_members WHERE group_uuid = excluded.uuid AND position IS NOT NULL)
"""
_LIST_MEMBERS = "INSERT INTO group_members (group_uuid, task_uuid, position)"
_LIST_MEMBERS_ONCE = """ON CONFLICT (group_uuid, task_uuid)
DO UPDATE SET position = excluded.position WHERE position IS NULL"""

# Rows of group, member, 1 if ok, 1. A member arrives once; one not (yet) in the list counts too.
_ARRIVE = "INSERT INTO group_members (group_uuid, task_uuid, ok, arrived)"
_ARRIVE_ONCE = """ON CONFLICT (group_uuid, task_uuid)
DO UPDATE SET arrived = 1, ok = excluded.ok WHERE arrived = 0"""

# In: group, new arrivals, total, callback, failed member or "", now, kept until. Makes the row if a
# member was faster than the group. A group that is ready is kept until its callback is settled.
_COUNT = """
INSERT INTO groups (uuid, created_at, ttl, locked, arrived, total, callback, failed_member,
    expires_at) VALUES (?1, ?6, 0, 0, ?2, ?3, ?4, ?5, ?7)
ON CONFLICT (uuid) DO UPDATE SET arrived = arrived + ?2, total = ?3, callback = ?4,
    failed_member = CASE failed_member WHEN '' THEN ?5 ELSE failed_member END,
    expires_at = CASE fired WHEN 1 THEN expires_at ELSE ?7 END
"""
_READY = """
UPDATE groups SET ready = 1, expires_at = NULL WHERE uuid = ? AND fired = 0 AND callback <> x''
AND ((total > 0 AND arrived >= total) OR failed_member <> '')
"""

# In: now, limit. Out: finished tasks whose time is over, but no members of unsettled chords.
_EXPIRED_TASKS = """
DELETE FROM tasks WHERE rowid IN (
    SELECT t.rowid FROM tasks AS t INDEXED BY tasks_expiring
    WHERE t.expires_at <= ?1 AND NOT EXISTS (
        SELECT 1 FROM group_members AS m JOIN groups AS g ON g.uuid = m.group_uuid
        WHERE m.task_uuid = t.uuid AND g.fired = 0 AND g.callback <> x'') LIMIT ?2)
"""

# In: now, limit.
_EXPIRED = (
    "DELETE FROM revoked WHERE uuid IN (SELECT uuid FROM revoked WHERE expires_at <= ? LIMIT ?)",
    "DELETE FROM claims WHERE name IN (SELECT name FROM claims WHERE expires_at <= ? LIMIT ?)",
)

# In: now, limit. Out: groups whose time is over and none of whose members has a state any more.
_EXPIRED_GROUPS = """
SELECT uuid FROM groups AS g INDEXED BY groups_expiring WHERE expires_at <= ?1 AND NOT EXISTS (
    SELECT 1 FROM group_members AS m JOIN tasks AS t ON t.uuid = m.task_uuid
    WHERE m.group_uuid = g.uuid) LIMIT ?2
"""

_RECORDS_VERSION = """
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'records'), 0)
    || '-' || (SELECT count(*) FROM records)
"""

# In: µs from, µs to, how many. Out: how many there are, the newest first, and µs of the last.
_STRETCH = """
SELECT count(*), min(changed_at) FROM (
    SELECT changed_at FROM tasks INDEXED BY tasks_changed
    WHERE changed_at >= ? AND changed_at <= ? ORDER BY changed_at DESC LIMIT ?)
"""

# In: µs from, µs to (twice), UUID behind which those of that µs begin.
_LISTED = f"""
SELECT {ALL}, changed_at FROM tasks INDEXED BY tasks_changed
WHERE changed_at >= ? AND changed_at <= ? AND (changed_at < ? OR uuid < ?) AND state IS NOT NULL
"""

# In: µs of a step, its seconds, µs from. Out: second at which a step begins, queue, counts.
_COUNTED = """
SELECT changed_at / ? * ? AS second, queue, sum(state = 'SUCCESS'), sum(state = 'FAILURE')
FROM tasks INDEXED BY tasks_changed
WHERE changed_at >= ? AND state IN ('SUCCESS', 'FAILURE') GROUP BY second, queue
"""

# In: UUIDs (JSON).
_DELETE_FINISHED = f"""
DELETE FROM tasks WHERE uuid IN (SELECT value FROM json_each(?))
AND state IN ('SUCCESS', 'FAILURE') AND NOT {AWAITED}
"""


class SQLiteBackend(TransactionalBackend):
    """Tables in the driver's file. The driver belongs to whoever made it."""

    features = BackendFeatures(name="sqlite", embedded=True, claims=True)

    def is_entered(self) -> bool:
        return self.driver.is_entered()

    def __init__(self, driver: SQLiteDriver, *, expire_in: float = EXPIRE_IN) -> None:
        self.driver = driver
        self.expire_in = expire_in
        self._last_change = 0
        self._arrived: dict[str, list[Arrival]] = {}

    def now(self) -> dt.datetime:
        return self.driver.clock.now()

    def _transaction(self) -> Transaction:
        return self.driver.transaction(BackendUnavailable)

    def _load(self, uuids: Iterable[str]) -> dict[str, Row]:
        wanted = list(uuids)
        if not wanted:
            return {}
        with self.driver.reading() as connection:
            found = connection.execute(LOAD, (as_json(wanted), self.driver.now())).fetchone()[0]
        return {
            row[0]: Row(state=state_of(row) if row[STATE] else None, mark=row[-2], epoch=row[-1])
            for row in decode_loaded(found)
        }

    def _next_epoch(self, epoch: int) -> int:
        with self._transaction() as connection:
            return next_fence(connection, self.driver.now())

    def _save(self, rows: Sequence[tuple[str, Row]]) -> None:
        now = self.driver.now()
        # Never the same moment twice: the listings are ordered by it.
        changed_at = max(now, self._last_change + 1)
        self._last_change = changed_at + len(rows)
        records = [
            record_of(uuid, row, changed_at + index, now=now, expire_in=self.expire_in)
            for index, (uuid, row) in enumerate(rows)
        ]
        with self._transaction() as connection:
            try:
                insert_rows(connection, SAVE, records, SAVE_OVER)
            except UnicodeEncodeError:
                insert_rows(
                    connection, SAVE, [tuple(map(plain, record)) for record in records], SAVE_OVER
                )

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        until = self.driver.now() + int(self.expire_in * 1e6)
        with self._transaction() as connection:
            for meta in groups:
                row = (
                    meta.group_uuid,
                    micros(meta.created_at),
                    meta.ttl,
                    int(meta.lock),
                    int(meta.chord_triggered),
                    until,
                    meta.plan,
                )
                if connection.execute(_ADD_GROUP, row).rowcount:
                    members = [
                        (meta.group_uuid, uuid, place) for place, uuid in enumerate(meta.task_uuids)
                    ]
                    insert_rows(connection, _LIST_MEMBERS, members, _LIST_MEMBERS_ONCE)

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        with self._transaction():
            self._arrived = {}
            verdicts = super().apply(changes)
            for group_uuid, arrivals in self._arrived.items():
                self._count(group_uuid, arrivals)
            return verdicts

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        # Counted at the end of the batch, in few steps: a chord's members come by the hundred.
        for one in arrivals:
            self._arrived.setdefault(one.group_uuid, []).append(one)

    def _count(self, group_uuid: str, arrivals: Sequence[Arrival]) -> None:
        now = self.driver.now()
        until = now + int(max(self.expire_in, CHORD_LIFE) * 1e6)
        with self._transaction() as connection:
            good = [(group_uuid, one.task_uuid, 1, 1) for one in arrivals if one.ok]
            new = insert_rows(connection, _ARRIVE, good, _ARRIVE_ONCE) if good else 0
            failed = ""
            for one in arrivals:
                if not one.ok and insert_rows(
                    connection, _ARRIVE, [(group_uuid, one.task_uuid, 0, 1)], _ARRIVE_ONCE
                ):
                    new, failed = new + 1, failed or one.task_uuid
            if new:
                last = arrivals[-1]
                connection.execute(
                    _COUNT, (group_uuid, new, last.total, last.callback, failed, now, until)
                )
                connection.execute(_READY, (group_uuid,))

    def _fire(self, group_uuid: str) -> bool:
        until = self.driver.now() + int(self.expire_in * 1e6)
        with self._transaction() as connection:
            fire = """UPDATE groups SET fired = 1, ready = 0, expires_at = ?
                WHERE uuid = ? AND fired = 0"""
            return connection.execute(fire, (until, group_uuid)).rowcount > 0

    def _keep_outbox(self, key: str, bodies: Sequence[bytes]) -> None:
        kept_at = self.driver.now()
        self._change(
            "INSERT OR REPLACE INTO outbox VALUES (?, ?, ?)",
            key,
            kept_at,
            encode_bodies(tuple(bodies)),
        )

    def _outbox(self, key: str) -> Sequence[bytes]:
        with self.driver.reading() as connection:
            row = connection.execute("SELECT bodies FROM outbox WHERE key = ?", (key,)).fetchone()
        return decode_bodies(row[0]) if row else ()

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        rows = [(key, encode_bodies(tuple(bodies))) for key, bodies in sent]
        with self._transaction() as connection:
            connection.executemany("DELETE FROM outbox WHERE key = ? AND bodies = ?", rows)

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = self.driver.now() - int(older_than * 1e6)
        found = self._read(
            "SELECT key, bodies FROM outbox WHERE kept_at <= ?"
            " ORDER BY kept_at, key LIMIT ? OFFSET ?",
            before,
            limit,
            skip,
        )
        return [(key, decode_bodies(bodies)) for key, bodies in found]

    def _held_by(self, rider: Rider) -> bytes | None:
        if rider.life:
            return self.claims([rider.name])[0]
        found = self._read("SELECT body FROM records WHERE name = ?", printable(rider.name))
        return found[0][0] if found else None

    def _ride(self, rider: Rider) -> None:
        table, name = ("claims", rider.name) if rider.life else ("records", printable(rider.name))
        with self._transaction() as connection:
            connection.execute(f"DELETE FROM {table} WHERE name = ?", (name,))
            if rider.body is not None and rider.life:
                until = self.driver.now() + int(rider.life * 1e6)
                connection.execute("INSERT INTO claims VALUES (?, ?, ?)", (name, rider.body, until))
            elif rider.body is not None:
                connection.execute(
                    "INSERT INTO records (name, body) VALUES (?, ?)", (name, rider.body)
                )

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        found: dict[str, bytes] = dict(
            self._read(
                "SELECT name, body FROM claims"
                " WHERE name IN (SELECT value FROM json_each(?)) AND expires_at > ?",
                as_json(names),
                self.driver.now(),
            )
        )
        return [found.get(name) for name in names]

    def records(self, known: str = "") -> Records:
        with self.driver.reading() as connection:
            # The greatest id ever given, and the number of rows: each change changes one of them.
            version = connection.execute(_RECORDS_VERSION).fetchone()[0]
            rows = (
                None
                if version == known
                else connection.execute("SELECT name, body FROM records").fetchall()
            )
        return Records(now=self.now(), version=version, bodies=None if rows is None else dict(rows))

    def _finished(self, uuids: Sequence[str]) -> None:
        self.driver.notify("r")

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        marks: dict[str, str] = dict(
            self._read(
                "SELECT uuid, mark FROM tasks WHERE uuid IN (SELECT value FROM json_each(?))",
                as_json(uuids),
            )
        )
        return [marks.get(uuid, "") for uuid in uuids]

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        query = f"""SELECT {ALL} FROM tasks
            WHERE uuid IN (SELECT value FROM json_each(?)) AND state IS NOT NULL AND {STANDS}"""
        states: dict[str, TaskState] = {}
        for start in range(0, len(uuids), READ):
            for row in self._read(query, as_json(uuids[start : start + READ]), self.driver.now()):
                states[row[0]] = state_of([*row], *row[-2:])
        return states

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        with self.driver.reading() as connection:
            row = connection.execute(
                "SELECT fired, locked, created_at, ttl, plan FROM groups WHERE uuid = ?",
                (group_uuid,),
            ).fetchone()
            members = connection.execute(
                "SELECT task_uuid FROM group_members"
                " WHERE group_uuid = ? AND position IS NOT NULL ORDER BY position",
                (group_uuid,),
            ).fetchall()
        if row is None:
            return None
        fired, locked, created_at, ttl, plan = row
        return GroupMeta(
            group_uuid=group_uuid,
            task_uuids=tuple(uuid for (uuid,) in members),
            chord_triggered=bool(fired),
            lock=bool(locked),
            created_at=moment_of(created_at),
            ttl=ttl,
            plan=plan,
        )

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        found = self._read(
            "SELECT uuid, callback, failed_member FROM groups INDEXED BY groups_ready"
            " WHERE ready = 1 ORDER BY uuid LIMIT ?",
            limit,
        )
        return [
            ReadyGroup(group_uuid=uuid, callback=body, failed_member=member)
            for uuid, body, member in found
        ]

    def list_states(
        self,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        low = 0 if since is None else micros(since)
        at, uuid = after or (LAST, "")
        query = f"{_LISTED} AND {STANDS}"
        with self.driver.reading() as connection:
            looked, floor = connection.execute(_STRETCH, (low, at, LOOK)).fetchone()
            parameters: list[object] = [floor or low, at, at, uuid, self.driver.now()]
            if states:
                query = f"{query} AND state IN (SELECT value FROM json_each(?))"
                parameters.append(as_json(list(states)))
            if name:
                query, parameters = f"{query} AND name = ?", [*parameters, printable(name)]
            rows = connection.execute(
                f"{query} ORDER BY changed_at DESC, uuid DESC LIMIT ?", (*parameters, limit)
            ).fetchall()
        found = [((row[-1], row[0]), state_of([*row], *row[-3:-1])) for row in rows]
        end: Place | None = (floor, "") if looked == LOOK else None
        if len(found) == limit:
            end, looked = found[-1][0], len(found)
        return Listing(found=found, end=end, looked=looked)

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        found = self._read(
            f"SELECT uuid FROM tasks WHERE uuid >= ? AND uuid < ? AND {STANDS}"
            " ORDER BY uuid LIMIT ?",
            *_range(prefix),
            self.driver.now(),
            limit,
        )
        return [uuid for (uuid,) in found]

    def finished_since(self, moment: dt.datetime, step: int = 3600) -> list[Count]:
        return counts_of(self._read(_COUNTED, step * 1_000_000, step, micros(moment)))

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        if life <= 0:
            return self._change(
                "DELETE FROM revoked WHERE uuid IN (SELECT value FROM json_each(?))", as_json(uuids)
            )
        until = self.driver.now() + int(life * 1e6)
        self._change(
            "INSERT OR REPLACE INTO revoked SELECT value, ? FROM json_each(?)",
            until,
            as_json(uuids),
        )

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        found = self._read(
            "SELECT uuid FROM revoked WHERE uuid IN (SELECT value FROM json_each(?))",
            as_json(uuids),
        )
        return {uuid for (uuid,) in found}

    def purge_state(self, task_uuid: str) -> None:
        self._change("DELETE FROM tasks WHERE uuid = ?", task_uuid)

    def _delete_finished(self, states: Sequence[TaskState]) -> None:
        self._change(_DELETE_FINISHED, as_json([printable(one.task_uuid) for one in states]))

    def purge_group_meta(self, group_uuid: str) -> None:
        with self._transaction() as connection:
            _delete_groups(connection, [group_uuid])

    def listener(self) -> SQLiteListener:
        return SQLiteListener(self.driver)

    def tend(self) -> float:
        now = self.driver.now()
        with self._transaction() as connection:
            counts = [
                connection.execute(_EXPIRED_TASKS, (now, BATCH)).rowcount,
                *(connection.execute(query, (now, BATCH)).rowcount for query in _EXPIRED),
            ]
            groups = [
                uuid for (uuid,) in connection.execute(_EXPIRED_GROUPS, (now, BATCH)).fetchall()
            ]
            if groups:
                _delete_groups(connection, groups)
        return 0.05 if max(*counts, len(groups)) >= BATCH else SWEEP

    def _read(self, query: str, *parameters: object) -> Rows:
        with self.driver.reading() as connection:
            return connection.execute(query, parameters).fetchall()

    def _change(self, query: str, *parameters: object) -> None:
        with self._transaction() as connection:
            connection.execute(query, parameters)

    def close(self) -> None:
        pass  # the driver belongs to whoever made it


def _delete_groups(connection: sqlite3.Connection, uuids: Sequence[str]) -> None:
    for table, column in (("groups", "uuid"), ("group_members", "group_uuid")):
        connection.execute(
            f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))",
            (as_json(uuids),),
        )


def _range(prefix: str) -> tuple[str, str]:
    """Return the bounds of texts with this beginning: not below the first, below the second."""
    return printable(prefix), printable(prefix) + "\U0010ffff"
