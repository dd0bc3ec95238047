"""A task state as Redis keeps it: Go's document, and a companion with the fields that Go does not know."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence

import msgspec

from machinery_py.backends.redis.scripts import CHORD_LIFE
from machinery_py.clock import micros, moment_of
from machinery_py.connections.redis.scripts import pack, raw
from machinery_py.errors import ArgumentError
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState
from machinery_py.wire.states import decode_state, encode_group, encode_state


class _Ours(msgspec.Struct, array_like=True, gc=False):
    """The fields of a state that are replaced with each change. `word` tells whether Go has changed the document since."""

    word: str
    attempt: int
    error_type: str = ""
    traceback: str = ""
    finished_at: int | None = None
    eta: int | None = None
    message: bytes = b""


Row = tuple[bytes | None, bytes | None]

_ours = msgspec.msgpack.Decoder(_Ours).decode
decode_rows = msgspec.msgpack.Decoder(list[Row]).decode
_CREATED = b'"CreatedAt":"'
_PLAIN: dict[
    tuple[str, int, bytes], bytes
] = {}  # our fields of a state that has none but its attempt, and `outcomes.ALONE`
_MOST = 2**31  # seconds; a longer expiry is refused by Redis


def packed_state(state: TaskState, now: dt.datetime, expire: int) -> tuple[object, ...]:
    """As lua.py says."""
    try:
        document, lines = encode_state(state), _lines(state)
    except (ArgumentError, UnicodeEncodeError):
        state = _printable(state)
        document, lines = encode_state(state), _lines(state)
    # The creation time is Go's last but one field, behind all that could hold such a text.
    at = document.rindex(_CREATED) + len(_CREATED)
    end = document.index(b'"', at)
    word = state.state
    # JSON is UTF-8, so the packer may take it as text, which is quicker than `raw`.
    return (
        state.task_uuid,
        word._value_,
        state.run,
        document[:at].decode(),
        document[at:end].decode(),
        document[end:].decode(),
        state.task_name != "",
        raw(lines),
        bool(state.started_at and state.queue and state.worker),
        state.progress is not None,
        line(state.queue),
        str(expire if word.is_finished else _kept(state, now)),
    )


def _lines(state: TaskState) -> bytes:
    started, progress = state.started_at, state.progress
    return (
        f"{'' if started is None else micros(started)}\n"
        f"{'' if progress is None else f'{progress[0]!r} {progress[1]!r}'}\n{line(state.queue)}\n{line(state.worker)}\n"
    ).encode() + _our_fields(state)


def line(text: str) -> str:
    """For a companion, which is made of lines."""
    return text.replace("\n", "\\n") if "\n" in text else text


def _kept(state: TaskState, now: dt.datetime) -> int:
    """Seconds that a state is kept that is not finished."""
    if state.eta is None or state.eta <= now:
        return CHORD_LIFE
    return min(_MOST, CHORD_LIFE + math.ceil((state.eta - now).total_seconds()))


def _our_fields(state: TaskState) -> bytes:
    finished, eta = state.finished_at, state.eta
    if (
        finished is None
        and eta is None
        and not state.error_type
        and not state.traceback
        and len(state.message) < 2
    ):
        key = (state.state._value_, state.attempt, state.message)
        plain = _PLAIN.get(key)
        if plain is None:
            plain = pack(
                (*key[:2], "", "", None, None, state.message) if state.message else key[:2]
            )
            if len(_PLAIN) < 1024:
                _PLAIN[key] = plain
        return plain
    return pack(
        (
            state.state._value_,
            state.attempt,
            state.error_type,
            state.traceback,
            None if finished is None else micros(finished),
            None if eta is None else micros(eta),
            state.message,
        )
    )


def _printable(state: TaskState) -> TaskState:
    """With what has no UTF-8 written out. If that was not what is wrong, encoding it says so."""
    texts = {
        name: getattr(state, name).encode("utf-8", "backslashreplace").decode()
        for name in (
            "task_uuid",
            "task_name",
            "error",
            "error_type",
            "traceback",
            "queue",
            "worker",
        )
    }
    return msgspec.structs.replace(state, **texts)


def packed_states(states: Sequence[TaskState], now: dt.datetime, expire: int) -> list[object]:
    """One after the other, as lua.py says."""
    return [value for state in states for value in packed_state(state, now, expire)]


class Changes:
    """The changes of one script call, and their states: C and S of lua.py."""

    __slots__ = ("_expire", "_now", "changes", "states")

    def __init__(self, now: dt.datetime, expire: int) -> None:
        self._now = now
        self._expire = expire
        self.changes: list[object] = []
        self.states: list[object] = []

    def add(
        self,
        *,
        key: str,
        mark: str = "",
        epoch: int = 0,
        force: bool = False,
        fires: str = "",
        states: Sequence[TaskState] = (),
        groups: Sequence[GroupMeta] = (),
        arrivals: Sequence[Arrival] = (),
        outbox: bytes = b"",
        packed: Sequence[object] | None = None,
    ) -> int:
        """Add what a `Change` says; returns its place. `packed`: its states, if that was done before."""
        place, first = len(self.changes) + 1, len(self.states) + 1
        self.states += packed_states(states, self._now, self._expire) if packed is None else packed
        self.changes += (
            key,
            line(mark),
            epoch,
            force,
            fires,
            first,
            len(self.states),
            [(group.group_uuid, raw(encode_group(group))) for group in groups] if groups else False,
            [
                (one.group_uuid, one.task_uuid, one.total, one.ok, raw(one.callback))
                for one in arrivals
            ]
            if arrivals
            else False,
            raw(outbox) if outbox else "",
        )
        return place


def state_of(document: bytes, companion: bytes | None) -> TaskState:
    """The state in a document and its companion."""
    state = decode_state(document)
    if companion is None:
        return state  # a Go program wrote it
    run, _, _, started, progress, queue, worker, ours = companion.split(b"\n", 7)
    own = _ours(ours) if ours else None
    if own is None or own.word != state.state._value_:
        own = _Ours(state.state._value_, 1)  # a Go program has changed it since
    return TaskState(
        task_uuid=state.task_uuid,
        task_name=state.task_name,
        state=state.state,
        results=state.results,
        error=state.error,
        created_at=state.created_at,
        ttl=state.ttl,
        run=int(run or 0),
        attempt=own.attempt,
        queue=queue.decode(),
        error_type=own.error_type,
        traceback=own.traceback,
        progress=_progress(progress),
        started_at=moment_of(int(started)) if started else None,
        finished_at=None if own.finished_at is None else moment_of(own.finished_at),
        eta=None if own.eta is None else moment_of(own.eta),
        worker=worker.decode(),
        message=own.message,
    )


def _progress(text: bytes | None) -> tuple[float, float] | None:
    if not text:
        return None
    done, total = text.split()
    return float(done), float(total)
