"""Messages as the scripts of the Redis broker take them, and as they are read from their bytes.

A signature says its UUID, name, queue and ETA in its bytes, and Go's keys hold nothing else. Of
other bytes the broker keeps a label: uuid and name. Only clean signatures go into Go's delayed set:
of other bytes a Go worker makes an empty task.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import msgspec

from machinery_py.brokers.base import DeadLetter, Message
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.clock import LAST, micros, moment_of
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.scripts import pack
from machinery_py.errors import QueueFull
from machinery_py.texts import printable
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.decode import KnownFields, known_fields
from machinery_py.wire.signatures import encode

#: A message as `packed` makes it, and the names of its values in the scripts.
Packed = tuple[int, int, int, msgspec.Raw, int, msgspec.Raw]
PACKED = "PLACE LEVEL DUE LABEL PARKS BODY"

EMPTY = raw(b"")
#: Times priority and one, less the turn: the place of a message of a fair queue, in place of a
#: priority. 256 of these are numbers of 14 digits, the most that Lua writes out.
FAIR = 2**38

_label = msgspec.msgpack.Decoder(list[str]).decode


@functools.lru_cache(maxsize=4096)
def _name_and_queue(name: str, queue: str) -> bytes:
    return b'","Name":' + encode(name) + b',"RoutingKey":' + encode(queue) + b","


class Queues:
    """The queues of one script call, each with its place in the list."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._places: dict[str, int] = {}
        self.keys: list[tuple[str, str]] = []
        for name in names:
            self.place(name)

    def place(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = len(self.keys)
            self.keys.append(queue_keys(name))
        return place


def packed(message: Message, queues: Queues) -> Packed:
    """Pack a message: (queue, priority, due in µs or 0, label, parks, body)."""
    due = 0 if message.eta is None else max(0, micros(message.eta))
    label = label_of(message)
    level = message.priority if message.tenant is None else (message.priority + 1) * FAIR
    return (
        queues.place(message.queue),
        level,
        due,
        raw(label) if label else EMPTY,
        message.parks,
        raw(message.body),
    )


def packed_batch(messages: Sequence[Message]) -> tuple[list[tuple[str, str]], list[Packed]]:
    """Pack messages for one script call; return the keys of their queues, and the rows."""
    queues = Queues()
    rows = [packed(message, queues) for message in messages]
    return queues.keys, rows


def packed_limits(
    limits: Sequence[QueueLimit], keys: Sequence[tuple[str, str]]
) -> list[tuple[int, int]]:
    """Pack limits for one script call: (place of the queue, how many may wait there already)."""
    places = {key: place for place, (key, _) in enumerate(keys)}
    return [(places[one.queue], one.limit - one.adds) for one in limits]


def full(answer: bytes, limits: Sequence[QueueLimit], keys: Sequence[tuple[str, str]]) -> QueueFull:
    """Return the error for what `full` in putting.lua says."""
    place, waiting = map(int, answer.split())
    [limit] = [one for one in limits if one.queue == keys[place][0]]
    return limit.passed(waiting)


def label_of(message: Message) -> bytes:
    """Return uuid and name, in a fair queue the tenant, too; nothing if the bytes say the same."""
    if message.tenant is not None:
        return pack((printable(message.uuid), printable(message.name), printable(message.tenant)))
    try:
        start = b'{"UUID":"' + message.uuid.encode() + _name_and_queue(message.name, message.queue)
        if message.body.startswith(start):
            return b""
        return pack((message.uuid, message.name))
    except UnicodeEncodeError:
        return pack((printable(message.uuid), printable(message.name)))


def message_of(
    body: bytes,
    *,
    queue: str,
    label: bytes = b"",
    priority: int = 0,
    parks: int = 0,
    due: int | None = None,
) -> Message:
    """Return the message as it was put. `due`: the moment in µs, if it is delayed."""
    eta = None if due is None else moment_of(due)
    tenant: str | None = None
    said = _said(label)
    if said is not None:
        uuid, name, *others = said
        tenant = others[0] if others else None
    else:
        fields = known_fields(body) or KnownFields()
        uuid, name = fields.UUID, fields.Name
        eta = eta or fields.eta
    return Message(
        uuid=uuid,
        name=name,
        queue=queue,
        body=body,
        eta=eta,
        priority=priority_of(priority),
        parks=parks,
        tenant=tenant,
    )


def priority_of(level: int) -> int:
    """Return the priority of a message with this level, which may be a place in a fair queue."""
    return level if level < FAIR // 2 else -(-level // FAIR) - 1


def message_parked(member: bytes, queue: str, due: int) -> Message:
    """Read one of our own delayed set that is due at this moment, in µs."""
    priority, parks, label, body = unwrapped(member)
    return message_of(body, queue=queue, label=label, priority=priority, parks=parks, due=due)


# Messages in Go's delayed set


def packed_go(body: bytes, said: KnownFields | None, place: int) -> Packed:
    """Pack one that is due now, for the queue at this place."""
    priority = said.Priority if said and 0 <= said.Priority <= 255 else 0
    return place, priority, 0, EMPTY, 0, raw(body)


def message_of_go(body: bytes, due: int) -> Message:
    """Read one that is due at this moment, in µs."""
    said = known_fields(body)
    queue, priority = (said.RoutingKey, said.Priority) if said else ("", 0)
    return message_of(body, queue=queue, priority=priority, due=due)


def bodies_for(queue: str, members: Iterable[bytes]) -> list[bytes]:
    """Return the members that are for this queue."""
    return [one for one in members if (said := known_fields(one)) and said.RoutingKey == queue]


# Names and entries, as the scripts return them


def named(members: Iterable[bytes]) -> list[str]:
    """Decode the names of queues, and sort them."""
    return sorted(name.decode(errors="replace") for name in members)


def noted(note: bytes) -> tuple[int, bytes]:
    """Read the note of a waiting message: (parks, label)."""
    counts, _, label = note.partition(b"\n")
    return int(counts.split()[2]), label


def unwrapped(member: bytes) -> tuple[int, int, bytes, bytes]:
    """Read a parked message: (priority, parks, label, body)."""
    head, _, rest = member.partition(b"\n")
    try:
        _, level, _, _, parks, size = map(int, head.split())
    except ValueError:  # another program put it there
        return 0, 0, b"", member
    return level, parks, rest[:size], rest[size:]


def near(number: float) -> int:
    """Return a moment in µs that a datetime can hold; another program's score may be any number."""
    return int(min(max(number, 0), micros(LAST)))


def head_of(uuid: str, name: str, reason: str, error: str) -> msgspec.Raw:
    """Return the head of a dead letter."""
    try:
        return raw(pack((uuid, name, reason, error)))
    except UnicodeEncodeError:
        return raw(pack(tuple(map(printable, (uuid, name, reason, error)))))


def _said(label: bytes) -> list[str] | None:
    """Return uuid, name and perhaps tenant in a label; None if there is none, or not ours."""
    try:
        said = _label(label) if label else []
    except MALFORMED:
        return None
    return said if len(said) > 1 else None


_head = msgspec.msgpack.Decoder(tuple[str, str, str, str]).decode


def letter_of(number: str, queue: str, letter: bytes) -> DeadLetter:
    """Read a dead letter, which has this number in its queue."""
    counts, _, rest = letter.partition(b"\n")
    strikes, died_at, head_size, label_size = map(int, counts.split())
    try:
        uuid, name, reason, error = _head(rest[:head_size])
    except MALFORMED:
        uuid = name = reason = error = ""
    label, body = rest[head_size : head_size + label_size], rest[head_size + label_size :]
    if not uuid and not name:
        message = message_of(body, queue=queue, label=label)
        uuid, name = message.uuid, message.name
    return DeadLetter(
        id=f"{number}@{queue}",
        uuid=uuid,
        name=name,
        queue=queue,
        body=body,
        reason=reason,
        error=error,
        strikes=strikes,
        died_at=moment_of(died_at),
    )
