"""A task state as Redis keeps it: Go's document, and a companion with our other fields."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeVar

import msgspec

from machinery_py.backends.base import Records, Rider
from machinery_py.backends.listings import Place
from machinery_py.backends.redis.scripts import CHORD_LIFE
from machinery_py.clock import micros, moment_of
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.keys import companion_key, document_key, encoded
from machinery_py.connections.redis.scripts import pack
from machinery_py.errors import ArgumentError, DecodeError
from machinery_py.fences import NO_FENCE, Fence
from machinery_py.tasks.states import FINISHED, Arrival, GroupMeta, State, TaskState
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.states import (
    EXTRA,
    EXTRA_MOMENTS,
    decode_group,
    decode_state,
    encode_group,
    encode_state,
    printable_state,
)

Row = tuple[bytes | None, bytes | None]
T = TypeVar("T")

# A companion has a line for each of these, which the scripts read. The other fields of ours follow,
# packed behind the state that they belong to: if the document has another one now, a Go program has
# written it since.
_LINES = ("run", "started_at", "progress", "queue", "worker")
_PACKED = tuple(field for field in EXTRA if field.name not in _LINES)
_NAMES = tuple(field.name for field in _PACKED)
_MESSAGE, _NOTES, _ROOT = map(_NAMES.index, ("message", "notes_json", "root"))
_DEFAULTS = tuple(field.default for field in _PACKED)[1:]  # of all but the attempt
_PLAIN_DEFAULTS = _DEFAULTS[: _MESSAGE - 1]
_MOMENTS = [place for place, name in enumerate(_NAMES, 1) if name in EXTRA_MOMENTS]  # in µs
_packed_values: Callable[[TaskState], tuple[Any, ...]] = attrgetter(*_NAMES)

_unpack = msgspec.msgpack.Decoder(list[Any]).decode
decode_rows: Final = msgspec.msgpack.Decoder(list[Row]).decode
_CREATED = '"CreatedAt":"'
_PLAIN: dict[tuple[object, ...], bytes] = {}  # by state and values, of those that many tasks share
_MOST = 2**31  # seconds; a longer expiry is refused by Redis


def new_state(state: TaskState, now: dt.datetime, expire: int) -> tuple[bytes, ...]:
    """Return (UUID, document, companion, seconds kept) of a task of which nothing is stored.

    Its UUID is one that we have made.
    """
    state, document, lines = _written(state)
    kept = b"%d" % _kept(state, now, expire)
    return state.task_uuid.encode(), document, b"0\n0\n\n" + lines, kept


def _written(state: TaskState) -> tuple[TaskState, bytes, bytes]:
    """Return the state, its document, and the lines of its companion behind the mark."""
    try:
        return state, encode_state(state), _lines(state)
    except (ArgumentError, UnicodeEncodeError):
        state = printable_state(state)
        return state, encode_state(state), _lines(state)


def _lines(state: TaskState) -> bytes:
    started, progress = state.started_at, state.progress
    return (
        f"{'' if started is None else micros(started)}\n"
        f"{'' if progress is None else f'{progress[0]!r} {progress[1]!r}'}\n"
        f"{line(state.queue)}\n{line(state.worker)}\n"
    ).encode() + _our_fields(state)


def line(text: str) -> str:
    """Return a text for a companion, which is made of lines."""
    return text.replace("\n", "\\n") if "\n" in text else text


def _kept(state: TaskState, now: dt.datetime, expire: int) -> int:
    """Return the seconds that a state is kept."""
    if state.state in FINISHED:
        return math.ceil(state.life(expire))
    if state.eta is None or state.eta <= now:
        return CHORD_LIFE
    return min(_MOST, CHORD_LIFE + math.ceil((state.eta - now).total_seconds()))


def _our_fields(state: TaskState) -> bytes:
    values = _packed_values(state)
    # Most states have but an attempt, and of the message at most the one byte of `outcomes.ALONE`.
    is_plain = values[1:_MESSAGE] == _PLAIN_DEFAULTS and len(values[_MESSAGE]) <= 1
    if not values[_ROOT]:
        values = values[:_ROOT]  # of a task that was sent alone
    if not is_plain or values[_NOTES] or len(values) > _ROOT:
        fields = [state.state._value_, *values]
        for place in _MOMENTS:
            if fields[place] is not None:
                fields[place] = micros(fields[place])
        return pack(fields)
    key = (state.state._value_, *values)
    plain = _PLAIN.get(key)
    if plain is None:
        plain = pack(key[:2] if values[1:] == _DEFAULTS[: _ROOT - 1] else key)
        if len(_PLAIN) < 1024:
            _PLAIN[key] = plain
    return plain


def packed_states(
    states: Sequence[TaskState], now: dt.datetime, expire: int
) -> tuple[list[object], int]:
    """Pack states one after the other, as changes.lua says; return their bytes, too."""
    packed: list[object] = []
    size = 0
    for one in states:
        state, document, lines = _written(one)
        size += len(document) + len(lines)
        # JSON is UTF-8, so the packer may take it as text, which is quicker than `raw`.
        text = document.decode()
        # The creation time is Go's last but one field, behind all that could hold such a text.
        at = text.rindex(_CREATED) + len(_CREATED)
        end = text.index('"', at)
        word = state.state
        packed += (
            state.task_uuid,
            word._value_,
            state.run,
            text[:at],
            text[at:end],
            text[end:],
            state.task_name != "",
            raw(lines),
            bool(state.started_at and state.queue and state.worker),
            state.progress is not None,
            line(state.queue),
            str(
                expire if word in FINISHED and state.keep_for is None else _kept(state, now, expire)
            ),
        )
    return packed, size


class Changes:
    """The changes of one script call, and what goes with them: C, S and R of changes.lua."""

    __slots__ = ("_expire", "_now", "changes", "riders", "states")

    def __init__(self, now: dt.datetime, expire: int) -> None:
        self._now = now
        self._expire = expire
        self.changes: list[object] = []
        self.states: list[object] = []
        self.riders: dict[int, list[object]] = {}

    def add(
        self,
        *,
        key: str,
        mark: str = "",
        epoch: Fence = NO_FENCE,
        force: bool = False,
        fires: str = "",
        states: Sequence[TaskState] = (),
        groups: Sequence[GroupMeta] = (),
        arrivals: Sequence[Arrival] = (),
        outbox: bytes = b"",
        riders: Sequence[Rider] = (),
        packed: Sequence[object] | None = None,
    ) -> int:
        """Add a `Change`; return its place. `packed`: its states, if they were packed before."""
        place, first = len(self.changes) + 1, len(self.states) + 1
        if packed is None:
            packed, _ = packed_states(states, self._now, self._expire)
        self.states += packed
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
        if riders:
            self.riders[place] = [
                (
                    encoded(one.name).decode(),
                    raw(one.expected or b""),
                    raw(one.body or b""),
                    math.ceil(one.life),
                )
                for one in riders
            ]
        return place

    def packed(self) -> tuple[object, ...]:
        """Return C and S, and R if there are riders."""
        if self.riders:
            return self.changes, self.states, self.riders
        return self.changes, self.states


def state_of(uuid: str, document: bytes, companion: bytes | None) -> TaskState:
    """Read the state of a task in its document and companion.

    Raises:
        DecodeError: one of them is another program's.
    """
    try:
        return _state_of(document, companion)
    except MALFORMED as error:
        raise foreign(uuid, error) from error


def group_of(uuid: str, document: bytes) -> GroupMeta:
    """Read the document of a group. Raises as `state_of`."""
    try:
        return decode_group(document)
    except MALFORMED as error:
        raise foreign(uuid, error) from error


def foreign(uuid: str, error: Exception) -> DecodeError:
    """Return the error for a key that another program has written to."""
    keys = " and ".join(repr(key(uuid).decode()) for key in (document_key, companion_key))
    return DecodeError(
        f"{uuid!r} is no task or group of ours: {error}; another program has written to {keys} "
        "(choose another UUID, or delete the keys)"
    )


def _state_of(document: bytes, companion: bytes | None) -> TaskState:
    state = decode_state(document)
    if companion is None:
        return state  # a Go program wrote it
    run, _, _, started, progress, queue, worker, ours = companion.split(b"\n", 7)
    fields: list[Any] = _unpack(ours) if ours else [""]
    if fields[0] != state.state._value_:
        fields = [""]
    for place in _MOMENTS:
        if place < len(fields) and fields[place] is not None:
            fields[place] = moment_of(fields[place])
    return msgspec.structs.replace(
        state,
        run=int(run or 0),
        started_at=moment_of(int(started)) if started else None,
        progress=_progress(progress),
        queue=queue.decode(),
        worker=worker.decode(),
        **dict(zip(_NAMES, fields[1:], strict=False)),
    )


def _progress(text: bytes | None) -> tuple[float, float] | None:
    if not text:
        return None
    done, total = text.split()
    return float(done), float(total)


# Replies of scripts


def records_of(now: bytes, version: bytes, rows: Sequence[bytes] | None = None) -> Records:
    """Read names and bodies in turn; None if the caller knows this version."""
    bodies = None
    if rows is not None:
        names = [name.decode(errors="backslashreplace") for name in rows[::2]]
        bodies = dict(zip(names, rows[1::2], strict=True))
    told = version.decode(errors="backslashreplace")
    return Records(now=moment_of(int(now)), version=told, bodies=bodies)


def counted(rows: Iterable[tuple[int, bytes, int]]) -> Iterator[tuple[int, str, int, int]]:
    """Read rows of RATES for `counts_of`."""
    for second, name, count in rows:
        good = name.startswith(b"S")  # SUCCESS or FAILURE; behind it the queue
        queue = name[7:].decode(errors="backslashreplace")
        yield second, queue, count if good else 0, 0 if good else count


def place_of(name: bytes, score: bytes) -> Place:
    """Return the place of a task in a sorted set."""
    return int(float(score)), name.decode()


def is_listed(states: Collection[State], state: TaskState, name: str) -> bool:
    """Return whether a listing of these states (none: all) and that name has this one."""
    return (not states or state.state in states) and name in ("", state.task_name)


def merged(
    parts: Iterable[tuple[Sequence[tuple[Place, T]], Place | None]],
) -> tuple[list[tuple[Place, T]], Place | None]:
    """Merge stretches of several sets, each with its end if more follows, into one."""
    found: list[tuple[Place, T]] = []
    end: Place | None = None
    for rows, last in parts:
        found += rows
        if last is not None and (end is None or last > end):
            end = last
    # Behind the first of their ends, only some of the sets have been read.
    return sorted(
        (row for row in found if end is None or row[0] >= end), key=itemgetter(0), reverse=True
    ), end


def pattern_of(prefix: bytes) -> bytes:
    """Return the pattern of names that begin like this."""
    return re.sub(rb"[*?\[\]\\^-]", rb"\\\g<0>", prefix) + b"*"
