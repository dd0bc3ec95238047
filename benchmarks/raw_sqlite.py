"""Row operations and commits of the SQLite store without the library: the limit of disk and SQLite.

    send     one transaction: a message, its token, its PENDING state
    claim    one transaction (synchronous = NORMAL): the messages become held; they are read
    settle   one transaction (FULL, an fsync): the messages go, the states become SUCCESS

The tables and indexes are the store's own, as far as these operations touch them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid

BODY = (
    b'{"UUID":"task_0","Name":"noop","Args":[{"Type":"int64","Value":1}],'
    b'"RoutingKey":"machinery_tasks"}'
)
INSERTED = 100  # rows in one INSERT where the library does not commit after each

TABLES = """
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, uuid TEXT NOT NULL,
    name TEXT NOT NULL,
    priority INTEGER NOT NULL, status INTEGER NOT NULL, due_at INTEGER, parks INTEGER NOT NULL,
    sent_at INTEGER NOT NULL, fence INTEGER NOT NULL DEFAULT 0, strikes INTEGER NOT NULL DEFAULT 0,
    session INTEGER, claim INTEGER, body BLOB NOT NULL);
CREATE INDEX messages_waiting ON messages (queue, priority DESC) WHERE status = 0;
CREATE INDEX messages_held ON messages (session, claim) WHERE status = 2;
CREATE TABLE tokens (token TEXT PRIMARY KEY, used_at INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX tokens_used ON tokens (used_at);
CREATE TABLE tasks (
    uuid TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT, queue TEXT NOT NULL,
    worker TEXT NOT NULL, mark TEXT NOT NULL, created_at INTEGER, started_at INTEGER,
    finished_at INTEGER, changed_at INTEGER NOT NULL,
    expires_at INTEGER, results BLOB);
CREATE INDEX tasks_changed ON tasks (changed_at, state, name, queue);
CREATE INDEX tasks_expiring ON tasks (expires_at) WHERE expires_at IS NOT NULL;
"""

MESSAGE = (
    "INSERT INTO messages (queue, uuid, name, priority, status, parks, sent_at, body)"
    " VALUES (?, ?, 'noop', 0, 0, 0, ?, ?)"
)
TASK = (
    "INSERT INTO tasks (uuid, name, state, queue, worker, mark, created_at, changed_at)"
    " VALUES (?, 'noop', 'PENDING', ?, '', '', ?, ?)"
)
CLAIM = """
UPDATE messages SET status = 2, session = 1, claim = ?, fence = fence + 1 WHERE id IN (
    SELECT id FROM messages INDEXED BY messages_waiting
    WHERE status = 0 AND queue = ? ORDER BY priority DESC, id LIMIT ?)
"""
CLAIMED = """
SELECT id, uuid, body FROM messages INDEXED BY messages_held
WHERE status = 2 AND session = 1 AND claim = ?
"""
DELETE = "DELETE FROM messages WHERE id IN (SELECT value FROM json_each(?))"
ROW = "(?, 'noop', 'SUCCESS', ?, ?, '1.1.1/1', ?, ?, ?, ?, ?, ?)"
SUCCESS = """
INSERT INTO tasks (
    uuid, name, state, queue, worker, mark, created_at, started_at, finished_at, changed_at,
    expires_at, results)
VALUES {rows} ON CONFLICT (uuid) DO UPDATE SET
    state = excluded.state, worker = excluded.worker, mark = excluded.mark,
    started_at = excluded.started_at, finished_at = excluded.finished_at,
    changed_at = excluded.changed_at, expires_at = excluded.expires_at,
    results = excluded.results
"""
QUEUE = "machinery_tasks"


def connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + TABLES)
    return connection


def now() -> int:
    return time.time_ns() // 1000


class RawSender:
    """Sender of blocks, to be run in turns with the library, so that load affects both alike."""

    def __init__(self, path: str) -> None:
        self._connection = connect(path)

    def __enter__(self) -> RawSender:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, count: int) -> float:
        """Send a block; return the seconds it took."""
        connection = self._connection
        began = time.perf_counter()
        for _ in range(count):
            key, moment = f"task_{uuid.uuid4()}", now()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO tokens VALUES (?, ?)", (str(uuid.uuid4()), moment))
            connection.execute(MESSAGE, (QUEUE, key, moment, BODY))
            connection.execute(TASK, (key, QUEUE, moment, moment))
            connection.execute("COMMIT")
        return time.perf_counter() - began


def drain_raw(path: str, count: int, *, batch: int) -> float:
    """Return the tasks per second, with a claim and a settlement for each `batch` of them."""
    connection = connect(path)
    connection.execute("BEGIN IMMEDIATE")
    for number in range(count):
        connection.execute(MESSAGE, (QUEUE, f"task_{number:036d}", now(), BODY))
        connection.execute(TASK, (f"task_{number:036d}", QUEUE, now(), now()))
    connection.execute("COMMIT")
    began = time.perf_counter()
    done = claim = 0
    while done < count:
        claim += 1
        rows = _claim(connection, claim, batch)
        _settle(connection, rows)
        done += len(rows)
    rate = count / (time.perf_counter() - began)
    connection.close()
    return rate


def _claim(connection: sqlite3.Connection, claim: int, limit: int) -> list[tuple[int, str]]:
    connection.executescript("PRAGMA synchronous = NORMAL")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(CLAIM, (claim, QUEUE, limit))
    connection.execute("COMMIT")
    return connection.execute(CLAIMED, (claim,)).fetchall()


def _settle(connection: sqlite3.Connection, rows: list[tuple[int, str]]) -> None:
    connection.executescript("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(DELETE, (json.dumps([row[0] for row in rows]),))
    moment = now()
    worker = f"bench-{os.getpid()}"
    for start in range(0, len(rows), INSERTED):
        part = rows[start : start + INSERTED]
        values = [value for row in part for value in (row[1], QUEUE, worker, *[moment] * 5, b"1")]
        connection.execute(SUCCESS.format(rows=",".join([ROW] * len(part))), values)
    connection.execute("COMMIT")
