"""Events on their way to other processes: records of the topic `events`.

A record is some lines, each an event as `machinery events --json` prints it. Of a task it has uuid,
name, queue and attempt, never arguments or headers. Readers leave out what they cannot read: it may
be from a newer version, or from a stranger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from machinery_py.events import Event, TaskEvent
from machinery_py.tasks.signature import HEADER_ATTEMPT, HEADER_CLOCK, Signature

EVENTS = "events"  # the topic
EVENTS_TTL = 600.0  # seconds
MAX_RECORD_EVENTS = 200
MAX_RECORD_BYTES = 60_000

_LOST = "events-lost"  # kind of a line that is no event: its process could not send so many
_LOST_LINE = b'{"kind":"%b",' % _LOST.encode()  # the beginning of such a line

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])


def clock_of(signature: Signature[Any]) -> int:
    """Return the clock that a message came with; 0 if it has none."""
    text = signature.headers.get(HEADER_CLOCK) if signature.headers else None
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 17 else 0


def line_of(event: Event, where: Mapping[str, Any]) -> bytes:
    """Return the event as a line of a record, with these fields in place of its own.

    Raises:
        TypeError, ValueError: it cannot be written as JSON, or is too large for a record.
    """
    record = event.as_json()
    record.update(where)
    line = _encoder.encode(record)
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(f"{event.kind} has {len(line):,} bytes (at most {MAX_RECORD_BYTES:,})")
    return line


def lost_line(count: int) -> bytes:
    """Return the line that tells readers of events which their process could not send."""
    return _encoder.encode({"kind": _LOST, "count": count})


def lost_in(line: bytes) -> int:
    """Return how many lost events this line tells of; 0 if it is another one."""
    if not line.startswith(_LOST_LINE):
        return 0
    count = _decoder.decode(line).get("count")
    return count if isinstance(count, int) and count > 0 else 0


def packed(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield records of these lines, filled up to their size."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        size += len(line) + 1
        if part and (size > MAX_RECORD_BYTES or len(part) >= MAX_RECORD_EVENTS):
            yield b"\n".join(part)
            part, size = [], len(line) + 1
        part.append(line)
    if part:
        yield b"\n".join(part)


def event_of(line: bytes, kinds: dict[str, type[Event]]) -> Event | None:
    """Return the event of a line; None if it is of no such kind.

    Raises:
        ValueError, RecursionError: it is no event.
    """
    found = _decoder.decode(line)
    kind = kinds.get(str(found.get("kind")))
    if kind is None:
        return None
    if issubclass(kind, TaskEvent):
        uuid, name, queue = (str(found.get(key, "")) for key in ("uuid", "name", "queue"))
        headers = {HEADER_ATTEMPT: str(found.get("attempt"))}
        found["signature"] = Signature(name=name, uuid=uuid, routing_key=queue, headers=headers)
    event = msgspec.convert(found, kind)
    if not 1 < event.at.year < 9999:
        raise ValueError(f"{event.kind} is of the year {event.at.year}")  # of no other zone's, too
    return event
