"""Publishing with confirms: all the messages of a call are on their way together, and each is confirmed by itself.

A message is `mandatory`: one that no queue takes comes back before its confirm. Which one it was is told by its correlation id,
the number of the batch and its place in it; the server says nothing else of it.

The thread that publishes encodes; the link's thread writes what is encoded, a piece at a time, and hears the confirms. So the
server is at the first messages of a large batch while the last ones are encoded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pika

from machinery_py.connections.rabbitmq.confirms import Batch, Confirms, End
from machinery_py.connections.rabbitmq.frames import AddressedMessage, Writer
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    settle,
)

CHUNK = 250  # messages written in one turn of the link's loop, which has heartbeats to send, too
PIECE = 65_536  # bytes, about, of one system call


class Publisher:
    """A channel in confirm mode on a link of its own. May be used from any thread."""

    def __init__(self, link: AmqpConnection, timeout: float) -> None:
        self.link = link
        self._timeout = timeout
        self._confirms = Confirms()  # touched in the link's thread alone
        self._batches: dict[int, Batch] = {}  # that somebody waits for
        self._numbers = itertools.count(1)
        self._retired = False
        self.channel: Channel = link.channel(timeout)
        self.channel.watch(self._on_lost)
        self._writer = Writer(self.channel.raw.channel_number, link.most)
        self.channel.ask(self._set_up, timeout)

    def _set_up(self, future: Future[Any]) -> None:
        self.channel.raw.add_on_return_callback(self._on_return)
        self.channel.raw.confirm_delivery(self._on_confirm, callback=lambda _: settle(future, None))

    @property
    def is_open(self) -> bool:
        return self.channel.is_open

    def publish(self, parcels: Sequence[AddressedMessage]) -> Batch:
        """Put the parcels on their way, and return when it is known what became of each, or nobody can say."""
        batch, number = Batch(parcels), next(self._numbers)
        self._batches[number] = batch
        try:
            self._send(batch, number)
            if not batch.wait(self._timeout) and batch.failure is None and not self.link.blocked:
                self.link.abort()  # it may lead nowhere; the next one is tried on another
        finally:
            del self._batches[number]
            self._close_if_done()
        return batch

    def retire(self) -> None:
        """Take nothing new; close when what is on its way has come to an end."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self._batches:
            self.link.close()

    def _send(self, batch: Batch, number: int) -> None:
        parcels = batch.parcels
        for start in range(0, len(parcels), CHUNK):
            chunk = parcels[start : start + CHUNK]
            try:
                pieces = self._encoded(chunk, number, start)
            except Exception as error:  # pika's and others, for what cannot be written
                batch.fail(error)
                return
            self.link.tell(functools.partial(self._write, batch, start, len(chunk), pieces))
        if not self.is_open:
            batch.fail(self.channel.lost or AmqpConnectionLost("closed"))

    def _encoded(self, chunk: Sequence[AddressedMessage], number: int, start: int) -> list[bytes]:
        """The frames of the parcels, in pieces that are not too large to be written at once."""
        pieces: list[bytes] = []
        frames: list[bytes] = []
        size = 0
        for index, parcel in enumerate(chunk, start):
            frames += self._writer.parcel(parcel, f"{number}.{index}")
            size += len(parcel.body)
            if size >= PIECE:
                pieces.append(b"".join(frames))
                frames, size = [], 0
        if frames:
            pieces.append(b"".join(frames))
        return pieces

    def _write(self, batch: Batch, start: int, count: int, pieces: Sequence[bytes]) -> None:
        """In the link's thread."""
        if self.channel.lost is not None:
            batch.fail(self.channel.lost)
            return
        try:
            self.channel.write(pieces)
        except Exception as error:  # a channel that is closing
            batch.fail(error)
            return
        self._confirms.wrote(batch, start, count)

    def tell(self, queue: str, body: bytes, correlation_id: str) -> None:
        """Send an answer that nobody minds losing. Not in confirm mode's order: it has a channel of its own."""

        def send() -> None:
            connection = self.channel.raw.connection
            connection.channel(
                on_open_callback=lambda raw: _answer(raw, queue, body, correlation_id)
            )

        self.link.tell(send)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        end = End.CONFIRMED if method.NAME == "Basic.Ack" else End.REFUSED
        self._confirms.hear(method.delivery_tag, end, multiple=method.multiple)

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        number, _, index = str(properties.correlation_id or "").partition(".")
        batch = self._batches.get(int(number or 0))
        if batch is not None and index:
            batch.note(int(index), int(index), End.RETURNED)

    def _on_lost(self, error: Exception) -> None:
        self._confirms.clear()
        for batch in list(self._batches.values()):
            batch.fail(error)

    def close(self) -> None:
        self.link.close()


def _answer(raw: Any, queue: str, body: bytes, correlation_id: str) -> None:
    raw.basic_publish("", queue, body, pika.BasicProperties(correlation_id=correlation_id))
    raw.close()
