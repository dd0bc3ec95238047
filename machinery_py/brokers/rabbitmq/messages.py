"""A message on RabbitMQ: Go Machinery's bytes and properties, and a few headers of ours that Go ignores.

content_type    application/json          delivery_mode   2 (persistent)        priority   of the message
message_id      the task's UUID           type            the task's name
headers
  machinery_sent       when it was put on its queue, in µs since 1970
  machinery_queue      where a delayed or dead message belongs
  machinery_eta        when a delayed message is due, in µs
  machinery_parks      how often a worker that did not know the task has put it back
  machinery_fence      deliveries that were counted so far
  machinery_strikes    deaths that were counted so far
  machinery_reason, machinery_error, machinery_died, machinery_letter      of a dead letter
  machinery_late       of a queue's name in the registry: delayed messages were sent to it
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from machinery_py.brokers.base import DeadLetter, Message
from machinery_py.clock import micros, moment_of
from machinery_py.connections.rabbitmq.frames import AddressedMessage
from machinery_py.errors import DecodeError
from machinery_py.texts import MAX_ERROR, cut
from machinery_py.wire.depth import is_deep
from machinery_py.wire.times import parse_time

SENT, QUEUE, ETA, PARKS = "machinery_sent", "machinery_queue", "machinery_eta", "machinery_parks"
FENCE, STRIKES = "machinery_fence", "machinery_strikes"
REASON, ERROR, DIED, LETTER = (
    "machinery_reason",
    "machinery_error",
    "machinery_died",
    "machinery_letter",
)
COPY = "machinery_copy"  # which move into a holding queue a copy belongs to
LATE = "machinery_late"  # of a name in the registry: delayed messages were sent to this queue
UUID, NAME = "machinery_uuid", "machinery_name"  # where the property cannot hold them

SHORT = 255  # bytes of a short string


class Taken(msgspec.Struct, gc=False):
    """A message as the server handed it over."""

    tag: int
    queue: str
    redelivered: bool
    priority: int
    headers: dict[str, Any]
    uuid: str
    name: str
    body: bytes
    subscription: str = ""  # brought it, and goes on until it is settled
    gotten: bool = False  # asked for, see amqp_gets

    def number(self, header: str) -> int:
        """A header of ours; 0 when it is not there, or somebody has put something else there."""
        value = self.headers.get(header)
        return int(value) if isinstance(value, int) else 0

    def text(self, header: str) -> str:
        value = self.headers.get(header)
        return value if isinstance(value, str) else ""

    @property
    def sent_at(self) -> dt.datetime | None:
        sent = self.number(SENT)
        return moment_of(sent) if sent else None


def taken(queue: str, method: Any, properties: Any, body: bytes) -> Taken:
    return Taken(
        tag=method.delivery_tag,
        queue=queue,
        redelivered=method.redelivered,
        priority=properties.priority or 0,
        headers=properties.headers or {},
        uuid=properties.message_id or "",
        name=properties.type or "",
        body=body,
    )


def parcel_of(
    exchange: str,
    key: str,
    *,
    body: bytes,
    uuid: str,
    name: str,
    priority: int,
    headers: dict[str, Any],
) -> AddressedMessage:
    """A parcel; what a property cannot hold goes into the headers."""
    if not _short(uuid):
        headers[UUID], uuid = _printable(uuid), ""
    if not _short(name):
        headers[NAME], name = _printable(name), ""
    return AddressedMessage(exchange, key, body, headers, uuid, name, priority)


def headers_of(message: Message, now: int) -> dict[str, Any]:
    headers: dict[str, Any] = {SENT: now}
    if message.parks:
        headers[PARKS] = message.parks
    return headers


def dead_headers(queue: str, reason: str, error: str, letter: str, now: int) -> dict[str, Any]:
    """Headers of a dead letter, beside its message."""
    return {
        QUEUE: queue,
        REASON: shortened(reason),
        ERROR: shortened(error),
        DIED: now,
        LETTER: letter,
    }


def message_of(one: Taken, *, queue: str = "") -> Message:
    """The message as it was put; what a foreign sender did not say is read from its body."""
    uuid, name = one.uuid or one.text(UUID), one.name or one.text(NAME)
    due = one.number(ETA)
    eta = moment_of(due) if due else None
    if not uuid and not name:
        said = _known(one.body)
        uuid, name = said.UUID, said.Name
        if eta is None and said.ETA is not None:
            eta = _time(said.ETA)
    return Message(
        uuid=uuid,
        name=name,
        queue=queue or one.queue,
        body=one.body,
        eta=eta,
        priority=one.priority,
        parks=one.number(PARKS),
    )


def letter_of(one: Taken) -> DeadLetter:
    message = message_of(one)
    return DeadLetter(
        id=one.text(LETTER),
        uuid=message.uuid,
        name=message.name,
        queue=one.text(QUEUE),
        body=one.body,
        reason=one.text(REASON),
        error=one.text(ERROR),
        strikes=one.number(STRIKES),
        died_at=moment_of(one.number(DIED)),
    )


def shortened(text: str) -> str:
    """A text that fits into a header: all headers must fit into one frame."""
    return _printable(cut(text, MAX_ERROR))


def due_in(eta: dt.datetime | None, now: dt.datetime) -> float:
    """Seconds until a moment; 0 for none and for one that has passed."""
    return 0.0 if eta is None else max(0.0, (micros(eta) - micros(now)) / 1e6)


class _ForeignBody(msgspec.Struct, gc=False):
    """Fields that are read of a body that another program has written."""

    UUID: str = ""
    Name: str = ""
    ETA: str | None = None


_decode = msgspec.json.Decoder(_ForeignBody).decode


def _known(body: bytes) -> _ForeignBody:
    if is_deep(body):
        return _ForeignBody()
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return _ForeignBody()


def _time(text: str) -> dt.datetime | None:
    try:
        return parse_time(text)
    except DecodeError:
        return None


def _short(text: str) -> bool:
    try:
        return len(text.encode()) <= SHORT
    except UnicodeEncodeError:
        return False


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def own_headers(one: Taken) -> dict[str, Any]:
    """The headers of a message that is published again, less what the server wrote there."""
    return {
        key: value
        for key, value in one.headers.items()
        if not key.startswith(("x-death", "x-first-death", "x-delivery"))
    }
