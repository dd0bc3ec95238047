"""Events on their way to other processes: `FleetEvent`, and records of the topic `events`.

A record is JSON:

    {"host": …, "pid": …, "events": [{"kind": "TaskFailed", "clock": 7, "at": 1700000000.5, …}, …]}

Of a task it has uuid, name, queue and attempt, never arguments or headers.
Readers leave out what they cannot read: it may be from a newer version, or from a stranger.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from machinery_py.clock import UTC
from machinery_py.control.lamport import Stamp
from machinery_py.events import Event, TaskEvent
from machinery_py.tasks.signature import HEADER_ATTEMPT, HEADER_CLOCK, Signature
from machinery_py.texts import cut

EVENTS = "events"  # the topic
EVENTS_TTL = 600.0  # seconds
MAX_RECORD_EVENTS = 200
MAX_RECORD_BYTES = 60_000
MAX_TEXT = 1_000  # bytes of an error or a result
MAX_TRACEBACK = 4_000  # characters, the last ones

#: Fields of a task's event → the attributes of its signature; the rest of it is not sent.
_OF_TASK = {"uuid": "uuid", "name": "name", "queue": "routing_key", "attempt": "attempt"}

E = TypeVar("E", bound=Event, covariant=True)
Row = dict[str, Any]  # an event as it is in a record


class FleetEvent(msgspec.Struct, Generic[E], frozen=True, kw_only=True):
    """An event of some process. It has the attributes of `event`, too; of a task's event also
    `uuid`, `name`, `queue` and `attempt`.

    Attributes:
        at: by the clock of that host.
        worker: its name; of an event that no worker sent, host and process.
        clock: the logical clock; see `stamp`.
        event: of a task, its signature has uuid, name, routing_key and attempt alone.
    """

    at: dt.datetime
    host: str
    pid: int
    worker: str
    clock: int
    event: E

    @property
    def kind(self) -> str:
        """The name of the event's class."""
        return type(self.event).__name__

    @property
    def stamp(self) -> Stamp:
        """The place in the order of all events: `sorted(events, key=lambda one: one.stamp)`."""
        return Stamp(self.clock, self.worker)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TASK and isinstance(self.event, TaskEvent):
            return getattr(self.event.signature, _OF_TASK[name])
        return getattr(self.event, name)

    def as_json(self) -> dict[str, Any]:
        """Return it as one flat mapping, as `machinery events --json` prints it."""
        row = row_of(self.event, clock=self.clock, at=self.at)
        return {**row, "at": self.at, "host": self.host, "pid": self.pid, "worker": self.worker}


def kinds_of(base: type[Event]) -> Iterator[type[Event]]:
    """Yield an event class and all that derive from it."""
    yield base
    for each in base.__subclasses__():
        yield from kinds_of(each)


def row_of(event: Event, *, clock: int, at: dt.datetime) -> Row:
    """Return the event as it goes into a record; nothing in it grows with the task's arguments."""
    row: Row = {"kind": type(event).__name__, "clock": clock, "at": at.timestamp()}
    row |= msgspec.structs.asdict(event)
    signature = row.pop("signature", None)
    if signature is not None:
        for key, attribute in _OF_TASK.items():
            row[key] = getattr(signature, attribute)
    for key in ("error", "result"):
        if row.get(key):
            row[key] = cut(row[key], MAX_TEXT)
    if len(row.get("traceback", "")) > MAX_TRACEBACK:
        row["traceback"] = "…" + row["traceback"][-MAX_TRACEBACK:]
    return row


def clock_of(signature: Signature[Any]) -> int:
    """Return the clock that a message came with; 0 if it has none."""
    text = signature.headers.get(HEADER_CLOCK) if signature.headers else None
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 17 else 0


class _EventRecord(msgspec.Struct):
    host: str
    pid: int
    events: Sequence[Row]


def packed(rows: Sequence[Row], *, host: str, pid: int) -> tuple[list[bytes], int]:
    """Return records with these events, and how many events cannot be in one."""
    records: list[bytes] = []
    refused = 0
    waiting = [rows[at : at + MAX_RECORD_EVENTS] for at in range(0, len(rows), MAX_RECORD_EVENTS)]
    while waiting:
        part = waiting.pop(0)
        try:
            record = msgspec.json.encode(_EventRecord(host=host, pid=pid, events=part))
        except (TypeError, ValueError):  # half a surrogate pair
            record = b""
        if record and len(record) <= MAX_RECORD_BYTES:
            records.append(record)
        elif len(part) == 1:
            refused += 1
        else:
            waiting[:0] = part[: len(part) // 2], part[len(part) // 2 :]
    return records, refused


class _EventHead(msgspec.Struct):
    """The fields that every event has."""

    clock: int
    at: float
    worker: str = ""
    uuid: str = ""
    name: str = ""
    queue: str = ""
    attempt: int = 1


_decoder = msgspec.json.Decoder(_EventRecord)


def unpacked(record: bytes, kinds: dict[str, type[Event]]) -> Iterator[FleetEvent[Any]]:
    """Yield the events of a record that are of these kinds, and that can be read.

    Raises:
        ValueError: it is no record of events.
    """
    found = _decoder.decode(record)
    for row in found.events:
        try:
            kind = kinds.get(row.get("kind", ""))
            if kind is None:
                continue
            head = msgspec.convert(row, _EventHead)
            if issubclass(kind, TaskEvent):
                row["signature"] = Signature(
                    name=head.name,
                    uuid=head.uuid,
                    routing_key=head.queue,
                    headers={HEADER_ATTEMPT: str(head.attempt)},
                )
            yield FleetEvent(
                at=dt.datetime.fromtimestamp(head.at, UTC),
                host=found.host,
                pid=found.pid,
                worker=head.worker or f"{found.host}-{found.pid}",
                clock=head.clock,
                event=msgspec.convert(row, kind),
            )
        except (ValueError, OverflowError, OSError, TypeError):
            continue
