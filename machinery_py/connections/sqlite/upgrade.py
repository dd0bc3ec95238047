"""Upgrade of files of version 10 and before: each message and record becomes a row.

All is carried over in one transaction, some 25 µs an item. A message that was held goes back to its
place: programs of the older version must have ended; one that has the file open finds no tables.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
import time
from typing import Any

import msgspec

from machinery_py.clock import moment_of
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.wire.bodies import MSGPACK
from machinery_py.wire.states import decode_results

_encode = msgspec.msgpack.Encoder().encode

_TEXTS = ("error", "error_type", "traceback", "notes_json", "root", "parent")  # NULL if empty
_MOMENTS = ("started_at", "finished_at", "eta")
TASK = (
    "uuid", "name", "state", "created_at", "ttl", "run", "attempt", "queue", "progress", "worker",
    "keep_for", *_TEXTS, *_MOMENTS, "results", "message", "mark", "epoch",
)  # fmt: skip
_WEEK = 7 * 86400 * 1_000_000  # µs that an open chord is kept
_TOKEN_LIFE = 600 * 1_000_000  # µs

#: A group with members that have come in, whose callback was not sent.
_OPEN = "fired = 0 AND callback <> x''"
_ROW = "INSERT INTO rows (kind, id, version, expires_at, sweep_at, at, name, body) SELECT"

CARRIED_OVER: tuple[str, ...] = (
    "INSERT INTO sqlite_sequence SELECT 'items', seq FROM sqlite_sequence WHERE name = 'messages'",
    "INSERT INTO items (id, queue, state, priority, turn, due, put_at, tenant, body, count,"
    " strikes) SELECT id, queue, iif(status = 1, 1, 0), priority, turn, coalesce(due_at, 0),"
    " sent_at, tenant, v10_message(uuid, name, queue, body, due_at, priority, parks, tenant),"
    " fence, strikes FROM messages ORDER BY id",
    f"{_ROW} 'dead', CAST(id AS TEXT), 1, NULL, NULL, died_at, queue,"
    " v10_letter(id, uuid, name, queue, body, reason, error, strikes, died_at) FROM dead",
    f"{_ROW} 'queue', name, 1, NULL, NULL, NULL, NULL, x'' FROM queues",
    f"{_ROW} 'closed', queue, 1, NULL, NULL, NULL, NULL, x'' FROM paused",
    f"{_ROW} 'token', token, 1, used_at + {_TOKEN_LIFE}, used_at + {_TOKEN_LIFE}, NULL, NULL, x''"
    " FROM tokens",
    f"{_ROW} 'task', uuid, 1, expires_at, expires_at, changed_at,"
    f" iif(state IN ('SUCCESS', 'FAILURE'), substr(state, 1, 1) || queue, ''),"
    f" v10_task({', '.join(TASK)}) FROM tasks",
    # UPDATE … FROM needs SQLite 3.33. All of these rows are there.
    "INSERT INTO rows (kind, id, version, body, kept_kind, kept_id)"
    " SELECT 'task', task_uuid, 1, x'', 'chord open', group_uuid FROM group_members"
    f" JOIN groups ON uuid = group_uuid WHERE {_OPEN}"
    " AND EXISTS (SELECT 1 FROM tasks WHERE tasks.uuid = task_uuid)"
    " ON CONFLICT (kind, id) DO UPDATE SET kept_kind = excluded.kept_kind,"
    " kept_id = excluded.kept_id",
    f"{_ROW} 'group', uuid, 1, NULL, NULL, v10_now(), '', v10_group(uuid, fired, locked,"
    " created_at, ttl, plan, (SELECT json_group_array(task_uuid) FROM (SELECT task_uuid FROM"
    " group_members WHERE group_uuid = uuid AND position IS NOT NULL ORDER BY position)))"
    " FROM groups",
    f"{_ROW} 'chord', uuid, 1, NULL, NULL, NULL, NULL, CAST(CAST((SELECT count(*) FROM"
    f" group_members WHERE group_uuid = uuid AND arrived = 1) AS TEXT) AS BLOB) FROM groups"
    f" WHERE {_OPEN}",
    "INSERT INTO members SELECT 'chord', group_uuid, task_uuid FROM group_members"
    f" JOIN groups ON uuid = group_uuid WHERE group_members.arrived = 1 AND {_OPEN}",
    f"{_ROW} 'chord open', uuid, 1, v10_now() + {_WEEK}, v10_now() + {_WEEK}, NULL, NULL, x''"
    f" FROM groups WHERE {_OPEN}",
    f"{_ROW} 'chord ready', uuid, 1, NULL, NULL, -v10_now(), '', v10_ready(callback, failed_member)"
    " FROM groups WHERE ready = 1",
    f"{_ROW} 'outbox', key, 1, NULL, NULL, -kept_at, '', bodies FROM outbox",
    f"{_ROW} 'record', name, 1, NULL, NULL, 0, '', body FROM records",
    f"{_ROW} 'records', '', 1, NULL, NULL, NULL, NULL, x''",
    f"{_ROW} 'claim', name, 1, expires_at, expires_at, NULL, NULL, body FROM claims",
    f"{_ROW} 'revoked', uuid, 1, expires_at, expires_at, NULL, NULL, x'' FROM revoked",
    *(
        f"DROP TABLE {table}"
        for table in (
            "messages", "dead", "sessions", "queues", "paused", "tokens", "tasks", "groups",
            "group_members", "outbox", "revoked", "records", "claims",
        )
    ),
)  # fmt: skip


def add_functions(connection: sqlite3.Connection) -> None:
    """Let the connection carry out CARRIED_OVER."""
    now = time.time_ns() // 1000
    connection.create_function("v10_now", 0, lambda: now)
    connection.create_function("v10_message", 8, _message)
    connection.create_function("v10_letter", 9, _letter)
    connection.create_function("v10_task", len(TASK), task_body)
    connection.create_function("v10_group", 7, _group)
    connection.create_function("v10_ready", 2, lambda *cells: _encode(cells))


def _moment(at: int | None) -> dt.datetime | None:
    return None if at is None else moment_of(at)


def _message(
    uuid: str,
    name: str,
    queue: str,
    body: bytes,
    due_at: int | None,
    priority: int,
    parks: int,
    tenant: str | None,
) -> bytes:
    message: dict[str, object] = {"uuid": uuid, "name": name, "queue": queue, "body": body}
    message |= {"eta": _moment(due_at), "priority": priority, "parks": parks, "tenant": tenant}
    return _encode(message)


def _letter(id: int, *cells: object) -> bytes:
    names = ("uuid", "name", "queue", "body", "reason", "error", "strikes")
    *texts, died_at = cells
    assert isinstance(died_at, int)
    letter = dict(zip(names, texts, strict=True))
    return _encode({"id": str(id), **letter, "died_at": moment_of(died_at)})


def task_body(*values: Any) -> bytes:
    """Return the body of a task's row, from the columns TASK."""
    cells: dict[str, Any] = dict(zip(TASK, values, strict=True))
    mark, epoch, state = cells.pop("mark"), cells.pop("epoch"), cells.pop("state")
    if state is None:
        return MSGPACK.encode_task(None, mark, epoch)
    uuid, name, progress = cells.pop("uuid"), cells.pop("name"), cells.pop("progress")
    results, message = cells.pop("results"), cells.pop("message")
    fields: dict[str, Any] = {name: cells.pop(name) or "" for name in _TEXTS}
    fields |= {name: _moment(cells.pop(name)) for name in _MOMENTS}
    if progress is not None:
        done, total = progress.split()
        fields["progress"] = float(done), float(total)
    if results is not None:
        fields["results"] = tuple(
            Arg(type=one.type, value=one.value, name=one.name) for one in decode_results(results)
        )
    created_at = moment_of(cells.pop("created_at"))
    task = TaskState(
        task_uuid=uuid,
        task_name=name,
        state=State(state),
        created_at=created_at,
        message=message or b"",
        **cells,
        **fields,
    )
    return MSGPACK.encode_task(task, mark, epoch)


def _group(
    uuid: str, fired: int, locked: int, created_at: int, ttl: int, plan: str, members: str
) -> bytes:
    return _encode(
        GroupMeta(
            group_uuid=uuid,
            task_uuids=tuple(msgspec.json.decode(members, type=list[str])),
            chord_triggered=bool(fired),
            lock=bool(locked),
            created_at=moment_of(created_at),
            ttl=ttl,
            plan=plan,
        )
    )
