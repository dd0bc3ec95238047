"""pika's connection, which writes many frames at once and reads deliveries with our own code.

pika has no public way for either, so this overrides private methods. All but the deliveries to
subscribers goes through pika as before; a release of pika that does not call these methods would
read deliveries by itself, correctly and slower.
"""

# What is pika's own is not in its stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pika import frame
from pika.adapters.select_connection import SelectConnection

from machinery_py.connections import descriptors
from machinery_py.connections.rabbitmq.frames import (
    BODY,
    DELIVER,
    END,
    HEADER,
    METHOD,
    OVERHEAD,
    read_delivery,
    read_frame,
    read_header,
)

READ = 65_536  # bytes of one system call; pika reads 4,096
PROTOCOL = b"AMQP"  # no frame, but the answer of a server that speaks another version


@dataclass(slots=True)
class _PartialDelivery:
    """A delivery that is not complete. `left`: missing bytes of the body."""

    channel: Any
    take: Any
    method: Any
    properties: Any = None
    body: list[bytes] = field(default_factory=list)
    left: int = 0

    def deliver(self) -> None:
        body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        self.take(self.channel, self.method, self.properties, body)


class Connection(SelectConnection):  # type: ignore[misc]  # pika has no types for mypy
    """A SelectConnection for much traffic. Belongs to the thread that runs its loop.

    A delivery is handed to its subscriber with a `DeliveryFields` and `Properties` instead of
    pika's objects.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._arrivals: dict[int, _PartialDelivery] = {}  # by channel
        self._frame_buffer = b""  # what pika calls so: a frame that is not all there
        super().__init__(*arguments, **options)

    @property
    def most(self) -> int:
        """Bytes of a body that go into one frame; known when the connection is open."""
        return int(self._body_max_length)

    def write(self, frames: bytes) -> None:
        """Send frames that are encoded already."""
        self._output_marshaled_frames([frames])

    def _proto_connection_made(self, transport: Any) -> None:
        transport._MAX_RECV_BYTES = READ
        descriptors.keep(transport._sock)
        super()._proto_connection_made(transport)

    def _on_data_available(self, data_in: bytes) -> None:
        self.bytes_received += len(data_in)  # by which pika knows that the server lives
        buffer = self._frame_buffer + data_in if self._frame_buffer else data_in
        begin = 0
        try:
            while after := _end_of_frame(buffer, begin):
                at, begin = begin, after
                if not self._takes(buffer, at, after):
                    _, value = frame.decode_frame(buffer[at:after])
                    if value is not None:
                        self._process_frame(value)
        finally:
            self._frame_buffer = buffer[begin:]

    def _takes(self, buffer: bytes, at: int, after: int) -> bool:
        """Deal with a frame of a delivery to a subscriber; return whether it was one."""
        kind, number, size = read_frame(buffer, at)
        payload = at + OVERHEAD - 1
        if kind == METHOD and buffer.startswith(DELIVER, payload) and buffer[after - 1] == END:
            return self._begins(number, *read_delivery(buffer, payload))
        arrival = self._arrivals.get(number)
        if arrival is None or buffer[after - 1] != END:
            return False
        if kind == HEADER:
            arrival.left, arrival.properties = read_header(buffer, payload, after - 1)
        elif kind == BODY:
            arrival.body.append(buffer[payload : after - 1])
            arrival.left -= size
        else:
            return False
        if arrival.left <= 0:
            del self._arrivals[number]
            arrival.deliver()
        return True

    def _begins(self, number: int, tag: bytes, method: Any) -> bool:
        channel = self._channels.get(number)
        name = tag.decode()
        if channel is None or name in channel._cancelled:
            return False
        take = channel._consumers.get(name)
        if take is None:
            return False
        self._arrivals[number] = _PartialDelivery(channel, take, method)
        return True


def _end_of_frame(buffer: bytes, at: int) -> int:
    """Return where the frame at `at` ends; 0 if it is not complete."""
    left = len(buffer) - at
    if left < OVERHEAD:
        return 0
    if buffer.startswith(PROTOCOL, at):
        return at + OVERHEAD
    size = read_frame(buffer, at)[2]
    return at + OVERHEAD + size if left >= OVERHEAD + size else 0
