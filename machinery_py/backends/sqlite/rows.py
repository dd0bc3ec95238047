"""A task as a row of the SQLite file, and back.

Limits: moments to the microsecond; half a surrogate pair in a text comes back written out.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec

from machinery_py.backends.transactional import Row
from machinery_py.clock import micros, moment_of
from machinery_py.tasks.states import State, TaskState
from machinery_py.texts import printable
from machinery_py.wire.states import EXTRA_MOMENTS, decode_results, encode_results

_BLOBS = ("results", "message")
_FIELDS = [field for field in msgspec.structs.fields(TaskState) if field.name not in _BLOBS]
_NAMES = tuple(field.name for field in _FIELDS)
_MOMENTS = [place for place, name in enumerate(_NAMES) if name in EXTRA_MOMENTS]
_TEXTS = [
    _NAMES.index(name)
    for name in ("error", "error_type", "traceback", "notes_json", "root", "parent")
]  # NULL if empty
STATE, _CREATED_AT, _PROGRESS = map(_NAMES.index, ("state", "created_at", "progress"))
_COLUMNS = tuple(name.removeprefix("task_") for name in _NAMES)

COLUMNS = ", ".join(_COLUMNS)
ALL = f"{COLUMNS}, results, message"

#: Tasks with a chord that is not settled.
AWAITED = """
EXISTS (
    SELECT 1 FROM group_members AS m JOIN groups AS g ON g.uuid = m.group_uuid
    WHERE m.task_uuid = tasks.uuid AND g.fired = 0 AND g.callback <> x'')
"""

#: In: now. Leaves out finished tasks whose time is over, unless a chord of theirs is not settled.
STANDS = f"(expires_at IS NULL OR expires_at > ? OR {AWAITED})"

# In: UUIDs (JSON), now. Out: one JSON array, so that it is one step. Without results: only finished
# tasks have them, and a finished task is never written again from what was loaded. Without message,
# which SAVE_OVER keeps.
LOAD = f"""
SELECT json_group_array(json_array({COLUMNS}, mark, epoch)) FROM tasks
WHERE uuid IN (SELECT value FROM json_each(?)) AND {STANDS}
"""

SAVE = f"INSERT INTO tasks ({COLUMNS}, mark, epoch, changed_at, expires_at, results, message)"
SAVE_OVER = (
    "ON CONFLICT (uuid) DO UPDATE SET "
    + ", ".join(
        f"{name} = excluded.{name}"
        for name in (*_COLUMNS[1:], "mark", "epoch", "changed_at", "expires_at", "results")
    )
    + ", message = CASE WHEN excluded.state = state AND excluded.run = run"
    " THEN coalesce(excluded.message, message) ELSE excluded.message END"
)


_STATES: dict[str, State] = {state.value: state for state in State}
encode_bodies = msgspec.msgpack.Encoder().encode
decode_bodies = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode
decode_loaded = msgspec.json.Decoder(list[list[Any]]).decode
_NOTHING = TaskState(task_uuid="")
_values: Callable[[TaskState], tuple[Any, ...]] = attrgetter(*_NAMES)


def record_of(
    uuid: str, row: Row, changed_at: int, *, now: int, expire_in: float
) -> tuple[object, ...]:
    """Return the values of a row, in the order of SAVE. `now`: µs."""
    state = row.state or _NOTHING
    cells = [*_values(state)]
    cells[0] = uuid
    cells[STATE] = None if row.state is None else state.state._value_
    cells[_CREATED_AT] = micros(state.created_at)
    for place in _MOMENTS:
        if cells[place] is not None:
            cells[place] = micros(cells[place])
    for place in _TEXTS:
        cells[place] = cells[place] or None
    if state.progress is not None:
        cells[_PROGRESS] = f"{state.progress[0]!r} {state.progress[1]!r}"
    return (
        *cells,
        row.mark,
        row.epoch,
        changed_at,
        now + int(state.life(expire_in) * 1e6) if row.state is None or state.is_finished else None,
        encode_results(state.results) if state.results else None,
        state.message or None,
    )


def state_of(
    cells: list[Any], results: bytes | None = None, message: bytes | None = None
) -> TaskState:
    """Return the state in the values of COLUMNS, which are changed; further values are ignored."""
    cells[STATE] = _STATES[cells[STATE] or ""]
    cells[_CREATED_AT] = moment_of(cells[_CREATED_AT])
    for place in _MOMENTS:
        if cells[place] is not None:
            cells[place] = moment_of(cells[place])
    for place in _TEXTS:
        cells[place] = cells[place] or ""
    if cells[_PROGRESS] is not None:
        done, total = cells[_PROGRESS].split()
        cells[_PROGRESS] = float(done), float(total)
    fields = dict(zip(_NAMES, cells, strict=False))
    if results is not None:
        fields["results"] = decode_results(results)
    return TaskState(message=message or b"", **fields)


def plain(value: object) -> object:
    return printable(value) if isinstance(value, str) else value
