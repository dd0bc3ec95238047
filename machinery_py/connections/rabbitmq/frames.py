"""AMQP frames of messages and acknowledgements, written and read by the batch.

pika makes several objects for each frame and writes each frame by itself: three system calls for
a message. Here all frames of a batch become one buffer. What is rare (a header value of an
unusual type, a property we never set) is left to pika's own code.

    frame       type, channel, size (7 bytes), payload, 0xCE
    a message   a method frame, a header frame (size of the body, properties), body frames
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from pika import spec
from pika.data import decode_table, encode_value

METHOD, HEADER, BODY = 1, 2, 3
OVERHEAD = 8  # bytes of a frame around its payload
END = 0xCE
LONGEST = 255  # bytes of a short string

# Class 60 and a method: the beginning of a method frame's payload.
DELIVER, ACK, NACK = b"\x00\x3c\x00\x3c", b"\x00\x3c\x00\x50", b"\x00\x3c\x00\x78"

# Property flags in the order in which the properties stand.
_TYPE, _MESSAGE_ID, _REPLY_TO, _CORRELATION_ID = 1 << 5, 1 << 7, 1 << 9, 1 << 10
_PRIORITY, _DELIVERY_MODE, _HEADERS, _CONTENT_TYPE = 1 << 11, 1 << 12, 1 << 13, 1 << 15
_KNOWN = _TYPE | _MESSAGE_ID | _REPLY_TO | _CORRELATION_ID
_KNOWN |= _PRIORITY | _DELIVERY_MODE | _HEADERS | _CONTENT_TYPE

_HALF = 1 << 31
_LONG, _INTEGER, _STRING = b"lIS"

_frame = struct.Struct(">BHL").pack
_content = struct.Struct(">HHQH").pack
_size = struct.Struct(">I").pack
_long = struct.Struct(">cq").pack
_settled = struct.Struct(">BHLHHQBB").pack

read_frame: Callable[[bytes, int], tuple[int, int, int]] = struct.Struct(">BHL").unpack_from

_read_content = struct.Struct(">HHQH").unpack_from
_read_tag = struct.Struct(">QB").unpack_from
_read_size = struct.Struct(">I").unpack_from
_read_integer = struct.Struct(">i").unpack_from
_read_long = struct.Struct(">q").unpack_from


class AddressedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message with its address. `headers` are AMQP's; the rest as in Message."""

    exchange: str
    key: str
    body: bytes
    headers: dict[str, Any]
    uuid: str = ""
    name: str = ""
    priority: int = 0


class DeliveryFields(msgspec.Struct, gc=False):
    """Fields of a delivery; the names are pika's."""

    delivery_tag: int
    redelivered: bool
    routing_key: str


class Properties(msgspec.Struct, gc=False):
    """Properties of a message; the names are pika's."""

    headers: dict[str, Any] | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    message_id: str | None = None
    type: str | None = None


class Writer:
    """Writes the frames of messages for one channel.

    Args:
        most: bytes of a body that go into one frame.
    """

    def __init__(self, channel: int, most: int) -> None:
        self._channel = channel
        self._most = most
        self._addresses: dict[tuple[str, str], bytes] = {}

    def message(self, message: AddressedMessage, correlation_id: str) -> list[bytes]:
        """Return the frames of a persistent, mandatory message, in pieces.

        Raises:
            ValueError, pika.exceptions.AMQPError: AMQP cannot say that.
        """
        channel, body = self._channel, message.body
        flags = _CONTENT_TYPE | _HEADERS | _DELIVERY_MODE | _PRIORITY | _CORRELATION_ID
        pieces = [b"", b"\x10application/json"]
        pieces += _table_of(message.headers)
        pieces.append(bytes((2, message.priority)))
        pieces.append(short(correlation_id))
        if message.uuid:
            flags |= _MESSAGE_ID
            pieces.append(short(message.uuid))
        if message.name:
            flags |= _TYPE
            pieces.append(short(message.name))
        pieces[0] = _content(60, 0, len(body), flags)
        pieces.insert(0, _frame(HEADER, channel, sum(map(len, pieces))))
        pieces.insert(0, self._address(message.exchange, message.key))
        pieces.append(b"\xce")
        for start in range(0, len(body), self._most):
            part = body[start : start + self._most] if len(body) > self._most else body
            pieces += (_frame(BODY, channel, len(part)), part, b"\xce")
        return pieces

    def _address(self, exchange: str, key: str) -> bytes:
        """Return the method frame, which most messages share with others."""
        found = self._addresses.get((exchange, key))
        if found is None:
            payload = b"\x00\x3c\x00\x28\x00\x00" + short(exchange) + short(key) + b"\x01"
            found = _frame(METHOD, self._channel, len(payload)) + payload + b"\xce"
            if len(self._addresses) >= 1024:  # delays have keys of their own
                self._addresses.clear()
            self._addresses[exchange, key] = found
        return found


def short(text: str) -> bytes:
    """Return a short string.

    Raises:
        ValueError: it is longer than LONGEST bytes, or has no UTF-8.
    """
    encoded = text.encode()
    if len(encoded) > LONGEST:
        raise ValueError(f"{text[:40]!r}…: longer than {LONGEST} bytes")
    return bytes((len(encoded),)) + encoded


def acks(channel: int, tags: Iterable[int], *, up_to: int = 0) -> bytes:
    """Return frames that acknowledge each of the tags, and all up to `up_to` if that is a tag."""
    frames = [_settled(METHOD, channel, 13, 60, 80, up_to, 1, END)] if up_to else []
    frames += [_settled(METHOD, channel, 13, 60, 80, tag, 0, END) for tag in tags]
    return b"".join(frames)


def nacks(channel: int, tags: Iterable[int]) -> bytes:
    """Return frames that give each of the tags back to its queue."""
    return b"".join([_settled(METHOD, channel, 13, 60, 120, tag, 2, END) for tag in tags])


def _table_of(headers: Mapping[str, Any]) -> list[bytes]:
    """Return a table, as pika writes it."""
    pieces = [b""]
    for key, value in headers.items():
        pieces.append(short(key))
        if type(value) is int and not -_HALF <= value < _HALF:
            pieces.append(_long(b"l", value))  # pika finds that out by an exception
        else:
            encode_value(pieces, value)
    pieces[0] = _size(sum(map(len, pieces)))
    return pieces


def read_delivery(buffer: bytes, at: int) -> tuple[bytes, DeliveryFields]:
    """Return the consumer's tag and the fields of the DELIVER frame with its payload at `at`."""
    begin = at + 5
    end = begin + buffer[at + 4]
    tag, redelivered = _read_tag(buffer, end)
    key = end + 10 + buffer[end + 9]  # behind the name of the exchange
    routing_key = buffer[key + 1 : key + 1 + buffer[key]].decode("utf-8", "surrogateescape")
    return buffer[begin:end], DeliveryFields(tag, bool(redelivered & 1), routing_key)


def read_confirm(buffer: bytes, at: int) -> tuple[int, bool]:
    """Return the number of the ACK or NACK frame with its payload at `at`, and its `multiple`."""
    number, flags = _read_tag(buffer, at + 4)
    return number, bool(flags & 1)


def read_header(buffer: bytes, at: int, end: int) -> tuple[int, Any]:
    """Return the size of the body, and the properties: ours, or pika's where we never set such.

    Raises:
        Exception: pika's, for what is no AMQP.
    """
    _, _, size, flags = _read_content(buffer, at)
    if not flags & ~_KNOWN:
        try:
            return size, _properties(buffer, at + 14, flags)
        except UnicodeDecodeError:
            pass  # pika leaves such a text as bytes
    properties = spec.BasicProperties()
    properties.decode(buffer[at + 12 : end])
    return size, properties


def _properties(buffer: bytes, at: int, flags: int) -> Properties:
    found = Properties()
    if flags & _CONTENT_TYPE:
        at += 1 + buffer[at]
    if flags & _HEADERS:
        found.headers, at = _table(buffer, at)
    if flags & _DELIVERY_MODE:
        at += 1
    if flags & _PRIORITY:
        found.priority = buffer[at]
        at += 1
    if flags & _CORRELATION_ID:
        found.correlation_id, at = _text(buffer, at)
    if flags & _REPLY_TO:
        found.reply_to, at = _text(buffer, at)
    if flags & _MESSAGE_ID:
        found.message_id, at = _text(buffer, at)
    if flags & _TYPE:
        found.type, at = _text(buffer, at)
    return found


def _text(buffer: bytes, at: int) -> tuple[str, int]:
    begin = at + 1
    end = begin + buffer[at]
    return buffer[begin:end].decode(), end


def _table(buffer: bytes, at: int) -> tuple[dict[str, Any], int]:
    """Return a table, and where it ends."""
    place = at + 4
    end = place + _read_size(buffer, at)[0]
    table: dict[str, Any] = {}
    while place < end:
        key, place = _text(buffer, place)
        kind = buffer[place]
        if kind == _LONG:
            [table[key]] = _read_long(buffer, place + 1)
            place += 9
        elif kind == _INTEGER:
            [table[key]] = _read_integer(buffer, place + 1)
            place += 5
        elif kind == _STRING:
            begin = place + 5
            place = begin + _read_size(buffer, place + 1)[0]
            table[key] = buffer[begin:place].decode()
        else:
            decoded: tuple[dict[str, Any], int] = decode_table(buffer, at)
            return decoded
    return table, end
