"""A message on RabbitMQ: Go Machinery's bytes and properties, and headers of ours that Go ignores.

content_type    application/json      delivery_mode   2 (persistent)      priority   of the message
message_id      the task's UUID       type            the task's name
headers
  machinery_sent       when it was put on its queue, in µs since 1970
  machinery_queue      where a delayed or dead message belongs
  machinery_eta        when a delayed message is due, in µs
  machinery_parks      how often a worker that did not know the task has put it back
  machinery_fence      deliveries that were counted so far
  machinery_strikes    deaths that were counted so far
  machinery_copy       of a copy in a holding queue: its number
  machinery_reason, machinery_error, machinery_died, machinery_letter      of a dead letter
  machinery_late       of a queue's name in the registry: delayed messages were sent to it
  machinery_uuid, machinery_name       where the property cannot hold them
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import msgspec

from machinery_py.brokers.base import DeadLetter, Message
from machinery_py.clock import micros, moment_of
from machinery_py.connections.rabbitmq.frames import AddressedMessage
from machinery_py.texts import printable
from machinery_py.wire.decode import KnownFields, known_fields

SENT, QUEUE, ETA, PARKS = "machinery_sent", "machinery_queue", "machinery_eta", "machinery_parks"
COUNT, STRIKES, COPY = "machinery_fence", "machinery_strikes", "machinery_copy"
REASON, ERROR = "machinery_reason", "machinery_error"
DIED, LETTER = "machinery_died", "machinery_letter"
LATE = "machinery_late"
UUID, NAME = "machinery_uuid", "machinery_name"

SHORT = 255  # bytes of a short string


class ReceivedMessage(msgspec.Struct, gc=False):
    """A message as the server handed it over."""

    tag: int
    queue: str
    redelivered: bool
    priority: int
    headers: dict[str, Any]
    uuid: str
    name: str
    body: bytes
    subscription: str = ""  # the consumer tag that brought it, if that lasts until it is settled
    gotten: bool = False  # by basic.get, see fetch.py

    def number(self, header: str) -> int:
        """Return a header of ours; 0 when it is not there, or holds something else."""
        value = self.headers.get(header)
        return int(value) if isinstance(value, int) else 0

    def text(self, header: str) -> str:
        value = self.headers.get(header)
        return value if isinstance(value, str) else ""

    def moment(self, header: str) -> dt.datetime | None:
        value = self.number(header)
        return moment_of(value) if value else None

    def own_headers(self) -> dict[str, Any]:
        """Return the headers for publishing it again, without those that the server wrote."""
        return {
            key: value
            for key, value in self.headers.items()
            if not key.startswith(("x-death", "x-first-death", "x-delivery"))
        }


def received(queue: str, method: Any, properties: Any, body: bytes) -> ReceivedMessage:
    return ReceivedMessage(
        tag=method.delivery_tag,
        queue=queue,
        redelivered=method.redelivered,
        priority=properties.priority or 0,
        headers=properties.headers or {},
        uuid=properties.message_id or "",
        name=properties.type or "",
        body=body,
    )


# Publishing


class Publication(msgspec.Struct, frozen=True, gc=False):
    """A message to publish.

    Attributes:
        needs: what must be declared for it, as Topology.steps takes it.
    """

    message: AddressedMessage
    needs: Sequence[tuple[str, str]] = ()


def addressed(
    exchange: str, key: str, message: Message | ReceivedMessage, headers: dict[str, Any]
) -> AddressedMessage:
    """Return the message with its address; what a property cannot hold goes into the headers."""
    uuid, name = message.uuid, message.name
    if not _is_short(uuid):
        headers[UUID], uuid = printable(uuid), ""
    if not _is_short(name):
        headers[NAME], name = printable(name), ""
    return AddressedMessage(exchange, key, message.body, headers, uuid, name, message.priority)


def headers_of(message: Message, now: dt.datetime) -> dict[str, Any]:
    headers: dict[str, Any] = {SENT: micros(now)}
    if message.parks:
        headers[PARKS] = message.parks
    return headers


def _is_short(text: str) -> bool:
    try:
        return len(text.encode()) <= SHORT
    except UnicodeEncodeError:
        return False


# Listing


def message_of(one: ReceivedMessage, *, queue: str = "") -> Message:
    """Return the message as it was put; what a foreign sender left out is read from its body."""
    uuid, name = one.uuid or one.text(UUID), one.name or one.text(NAME)
    eta = one.moment(ETA)
    if not uuid and not name:
        fields = known_fields(one.body) or KnownFields()
        uuid, name, eta = fields.UUID, fields.Name, eta or fields.eta
    return Message(
        uuid=uuid,
        name=name,
        queue=queue or one.queue,
        body=one.body,
        eta=eta,
        priority=one.priority,
        parks=one.number(PARKS),
    )


def letter_of(one: ReceivedMessage) -> DeadLetter:
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
