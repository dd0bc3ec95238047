"""A task as a row of the SQLite file, and back.

Limits: moments to the microsecond; a text with half a surrogate pair comes back with that written out.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from machinery_py.backends.transactional import Row
from machinery_py.clock import micros, moment_of
from machinery_py.connections.sqlite.rows import printable
from machinery_py.tasks.states import State, TaskState
from machinery_py.wire.states import decode_results, encode_results

COLUMNS = (
    "uuid, name, state, run, attempt, queue, created_at, ttl, error, error_type, traceback, progress, started_at,"
    " finished_at, eta, worker"
)
ALL = f"{COLUMNS}, results, message"

#: In: now. Less what is finished and whose time is over, but for the members of chords that are not settled.
STANDS = """
(expires_at IS NULL OR expires_at > ? OR EXISTS (
    SELECT 1 FROM group_members AS m JOIN groups AS g ON g.uuid = m.group_uuid
    WHERE m.task_uuid = tasks.uuid AND g.fired = 0 AND g.callback <> x''))
"""

# In: UUIDs (JSON), now. Out: one JSON array, so that it is one step. Without results: only finished tasks have them, and what
# is finished is never written again from what was loaded. Without message, which SAVE_OVER keeps.
LOAD = f"""
SELECT json_group_array(json_array({COLUMNS}, mark, epoch)) FROM tasks
WHERE uuid IN (SELECT value FROM json_each(?)) AND {STANDS}
"""

SAVE = f"INSERT INTO tasks ({COLUMNS}, mark, epoch, changed_at, expires_at, results, message)"
SAVE_OVER = (
    "ON CONFLICT (uuid) DO UPDATE SET "
    + ", ".join(
        f"{name.strip()} = excluded.{name.strip()}"
        for name in f"{COLUMNS}, mark, epoch, changed_at, expires_at, results".split(",")[1:]
    )
    + ", message = CASE WHEN excluded.state = state AND excluded.run = run THEN coalesce(excluded.message, message)"
    " ELSE excluded.message END"
)


class TaskRow(msgspec.Struct, array_like=True, gc=False):
    """A task's row as LOAD gives it, in the order of COLUMNS."""

    uuid: str
    name: str
    state: str | None
    run: int
    attempt: int
    queue: str
    created_at: int
    ttl: int
    error: str | None
    error_type: str | None
    traceback: str | None
    progress: str | None
    started_at: int | None
    finished_at: int | None
    eta: int | None
    worker: str
    mark: str = ""
    epoch: int = 0

    def task_state(self, results: bytes | None = None, message: bytes | None = None) -> TaskState:
        return TaskState(
            task_uuid=self.uuid,
            task_name=self.name,
            state=_STATES[self.state or ""],
            error=self.error or "",
            results=decode_results(results) if results is not None else (),
            created_at=moment_of(self.created_at),
            ttl=self.ttl,
            run=self.run,
            attempt=self.attempt,
            queue=self.queue,
            error_type=self.error_type or "",
            traceback=self.traceback or "",
            progress=_progress(self.progress),
            started_at=_moment(self.started_at),
            finished_at=_moment(self.finished_at),
            eta=_moment(self.eta),
            worker=self.worker,
            message=message or b"",
        )


_STATES: dict[str, State] = {state.value: state for state in State}
encode_bodies = msgspec.msgpack.Encoder().encode
decode_bodies = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode
decode_kept = msgspec.json.Decoder(list[TaskRow]).decode
_NOTHING = TaskState(task_uuid="")


def record_of(uuid: str, row: Row, changed_at: int, expires_at: int) -> tuple[object, ...]:
    """In the order of SAVE."""
    state = row.state or _NOTHING
    finished = row.state is None or state.is_finished
    return (
        uuid,
        state.task_name,
        None if row.state is None else state.state._value_,
        state.run,
        state.attempt,
        state.queue,
        micros(state.created_at),
        state.ttl,
        state.error or None,
        state.error_type or None,
        state.traceback or None,
        None if state.progress is None else f"{state.progress[0]!r} {state.progress[1]!r}",
        None if state.started_at is None else micros(state.started_at),
        None if state.finished_at is None else micros(state.finished_at),
        None if state.eta is None else micros(state.eta),
        state.worker,
        row.mark,
        row.epoch,
        changed_at,
        expires_at if finished else None,
        encode_results(state.results) if state.results else None,
        state.message or None,
    )


def state_of(row: tuple[Any, ...]) -> TaskState:
    """From ALL."""
    return TaskRow(*row[:-2]).task_state(row[-2], row[-1])


def _progress(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    done, total = text.split()
    return float(done), float(total)


def _moment(number: int | None) -> dt.datetime | None:
    return None if number is None else moment_of(number)


def plain(value: object) -> object:
    return printable(value) if isinstance(value, str) else value
