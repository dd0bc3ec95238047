"""pika's connection, which writes at once and reads deliveries and confirms with our own code.

pika has no public way for either, so this overrides private methods. All but the deliveries to
subscribers and the confirms of messages goes through pika as before; a release of pika that does
not call these methods would read those by itself, correctly and slower.

pika's loop waits until the socket is writable, and writes then: a wake-up of its thread and two
turns of its loop for each message that another thread sends. Here whoever has frames writes them;
what the socket has no room for is left to the loop. With TLS all is written by the loop, since no
two threads may use one TLS session.
"""

# What is pika's own is not in its stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pika import frame
from pika.adapters.select_connection import SelectConnection
from pika.adapters.utils.io_services_utils import _AsyncPlaintextTransport

from machinery_py.connections import descriptors
from machinery_py.connections.rabbitmq.frames import (
    ACK,
    BODY,
    DELIVER,
    END,
    HEADER,
    METHOD,
    NACK,
    OVERHEAD,
    read_confirm,
    read_delivery,
    read_frame,
    read_header,
)

READ = 65_536  # bytes of one system call; pika reads 4,096
PROTOCOL = b"AMQP"  # no frame, but the answer of a server that speaks another version

#: Takes a confirm: the number of the message, whether all up to it are meant, whether it is stored.
Hear = Callable[[int, bool, bool], object]


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
        self._confirmed: dict[int, Hear] = {}  # by channel
        self._frame_buffer = b""  # what pika calls so: a frame that is not all there
        self._writing = threading.Lock()  # guards the socket's end for writing, and its closing
        self._plain: Any = None  # pika's transport, if others than the loop may write
        super().__init__(*arguments, **options)

    @property
    def most(self) -> int:
        """Bytes of a body that go into one frame; known when the connection is open."""
        return int(self._body_max_length)

    @property
    def is_shared(self) -> bool:
        """Whether any thread may `write`; else the thread of the loop alone."""
        return self._plain is not None

    def write(self, frames: bytes) -> None:
        """Send frames that are encoded already; nothing if the connection is lost."""
        self._output_marshaled_frames([frames])

    def hear_confirms(self, channel: int, hear: Hear) -> None:
        """Have the confirms of a channel's messages taken by this."""
        self._confirmed[channel] = hear

    # Writing

    def _proto_connection_made(self, transport: Any) -> None:
        transport._MAX_RECV_BYTES = READ
        descriptors.keep(transport._sock)
        if type(transport) is _AsyncPlaintextTransport:
            self._share(transport)
        super()._proto_connection_made(transport)

    def _share(self, transport: Any) -> None:
        """Let all threads write, one at a time, and none while the socket is closed."""
        produce, close = transport._produce, transport._close_and_finalize

        def guarded(work: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                with self._writing:
                    work()

            return run

        def consume() -> None:
            # pika would read until there is nothing; the poller tells if there is more.
            data = transport._sock.recv(READ)
            if not data:
                raise transport.RxEndOfFile
            self._on_data_available(data)

        transport._produce, transport._close_and_finalize = guarded(produce), guarded(close)
        transport._consume = consume
        self._plain = transport

    def _adapter_emit_data(self, data: bytes) -> None:
        transport = self._plain
        if transport is None:
            super()._adapter_emit_data(data)
            return
        with self._writing:
            if transport._state != transport._STATE_ACTIVE:
                return
            is_first, sent = not transport._tx_buffers, 0
            if is_first:
                try:
                    sent = transport._sock.send(data)
                except OSError:
                    pass  # no room; or lost, which the loop finds out by the same error
            if sent < len(data):
                transport._buffer_tx_data(data[sent:] if sent else data)
                if is_first:
                    self.ioloop.add_callback_threadsafe(self._watch_writable)

    def _watch_writable(self) -> None:
        transport = self._plain
        if transport._state == transport._STATE_ACTIVE and transport._tx_buffers:
            transport._nbio.set_writer(transport._sock.fileno(), transport._on_socket_writable)

    # Reading

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
        """Deal with a confirm, or a frame of a delivery to a subscriber; whether it was one."""
        kind, number, size = read_frame(buffer, at)
        payload = at + OVERHEAD - 1
        if kind == METHOD and buffer[after - 1] == END:
            if buffer.startswith(DELIVER, payload):
                return self._begins(number, *read_delivery(buffer, payload))
            hear = self._confirmed.get(number)
            if hear is not None and buffer.startswith((ACK, NACK), payload):
                message, multiple = read_confirm(buffer, payload)
                hear(message, multiple, buffer.startswith(ACK, payload))
                return True
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
