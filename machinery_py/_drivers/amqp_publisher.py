"""Publishing with confirms: all the messages of a call are on their way together, and each is confirmed by itself.

A message is `mandatory`: one that no queue takes comes back before its confirm. Which one it was is told by the number in
its correlation id; the server says nothing else of it.

    confirmed    a queue has it, on disk if it is durable
    returned     no queue took it; it is nowhere
    refused      the server said no (a full queue that rejects); it is nowhere
    unknown      the connection ended, or nothing was said in time
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any

import msgspec
import pika

from machinery_py._drivers.amqp_link import Channel, Link, LinkLost, settle

CHUNK = 500  # messages written in one turn of the link's loop, which has heartbeats to send, too


class Parcel(msgspec.Struct, frozen=True, gc=False):
    """A message with its address. `headers` are AMQP's; the rest as in Message."""

    exchange: str
    key: str
    body: bytes
    headers: dict[str, Any]
    uuid: str = ""
    name: str = ""
    priority: int = 0


class End(Enum):
    """What became of a parcel."""

    UNKNOWN = "unknown"
    CONFIRMED = "confirmed"
    RETURNED = "returned"
    REFUSED = "refused"


class Batch:
    """Parcels on their way. `ends` has one entry for each."""

    def __init__(self, parcels: Sequence[Parcel]) -> None:
        self.parcels = parcels
        self.ends = [End.UNKNOWN] * len(parcels)
        self.failure: Exception | None = None  # why what is unknown is so
        self._left = len(parcels)
        self._moved = threading.Condition()

    def note(self, index: int, end: End) -> None:
        with self._moved:
            if self.ends[index] is End.UNKNOWN:
                self.ends[index] = end
                self._left -= 1
                if not self._left or self._left % 64 == 0:
                    self._moved.notify_all()

    def fail(self, error: Exception) -> None:
        with self._moved:
            self.failure = error
            self._moved.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether it is known of each what became of it. Gives up when nothing was said for `timeout` seconds."""
        with self._moved:
            left, deadline = self._left, time.monotonic() + timeout
            while self._left and self.failure is None:
                if not self._moved.wait(deadline - time.monotonic()) and self._left == left:
                    return False
                if self._left != left:
                    left, deadline = self._left, time.monotonic() + timeout
            return not self._left


class Publisher:
    """A channel in confirm mode on a link of its own. May be used from any thread."""

    def __init__(self, link: Link, timeout: float) -> None:
        self.link = link
        self._timeout = timeout
        self._outstanding: dict[int, tuple[Batch, int]] = {}  # touched in the link's thread alone
        self._batches: set[Batch] = set()  # that somebody waits for
        self._numbers = itertools.count(1)
        self.channel: Channel = link.channel(timeout)
        self.channel.watch(self._on_lost)
        self.channel.ask(self._set_up, timeout)

    def _set_up(self, future: Future[Any]) -> None:
        self.channel.raw.add_on_return_callback(self._on_return)
        self.channel.raw.confirm_delivery(self._on_confirm, callback=lambda _: settle(future, None))

    @property
    def is_open(self) -> bool:
        return self.channel.is_open

    def publish(self, parcels: Sequence[Parcel]) -> Batch:
        """Put the parcels on their way, and return when it is known what became of each, or nobody can say."""
        batch = Batch(parcels)
        self._batches.add(batch)
        try:
            self._send(batch)
            if not batch.wait(self._timeout) and batch.failure is None and not self.link.blocked:
                self.link.abort()  # it may lead nowhere; the next one is tried on another
        finally:
            self._batches.discard(batch)
        return batch

    def _send(self, batch: Batch) -> None:
        parcels = batch.parcels
        for start in range(0, len(parcels), CHUNK):
            self.link.tell(functools.partial(self._write, batch, start))
        if not self.is_open:
            batch.fail(self.channel.lost or LinkLost("closed"))

    def _write(self, batch: Batch, start: int) -> None:
        """In the link's thread."""
        for index, parcel in enumerate(batch.parcels[start : start + CHUNK], start):
            if self.channel.lost is not None:
                batch.fail(self.channel.lost)
                return
            number = next(self._numbers)
            self._outstanding[number] = (batch, index)
            try:
                self.channel.raw.basic_publish(
                    parcel.exchange, parcel.key, parcel.body, _properties(parcel, number), mandatory=True
                )
            except Exception as error:  # pika's, for what cannot be written: no later number may be off by one
                batch.fail(error)
                self.channel.raw.close()
                return

    def tell(self, queue: str, body: bytes, correlation_id: str) -> None:
        """Send an answer that nobody minds losing. Not in confirm mode's order: it has a channel of its own."""
        def send() -> None:
            connection = self.channel.raw.connection
            connection.channel(on_open_callback=lambda raw: _answer(raw, queue, body, correlation_id))

        self.link.tell(send)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        end = End.CONFIRMED if method.NAME == "Basic.Ack" else End.REFUSED
        tag = method.delivery_tag
        # What is outstanding is in order, oldest first.
        numbers = [number for number in self._outstanding if number <= tag] if method.multiple else [tag]
        for number in numbers:
            entry = self._outstanding.pop(number, None)
            if entry is not None:
                entry[0].note(entry[1], end)

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        entry = self._outstanding.get(int(properties.correlation_id or 0))
        if entry is not None:
            entry[0].note(entry[1], End.RETURNED)

    def _on_lost(self, error: Exception) -> None:
        self._outstanding.clear()
        for batch in list(self._batches):
            batch.fail(error)

    def close(self) -> None:
        self.link.close()


def _answer(raw: Any, queue: str, body: bytes, correlation_id: str) -> None:
    raw.basic_publish("", queue, body, pika.BasicProperties(correlation_id=correlation_id))
    raw.close()


def _properties(parcel: Parcel, number: int) -> pika.BasicProperties:
    return pika.BasicProperties(
        content_type="application/json", delivery_mode=2, priority=parcel.priority, headers=parcel.headers,
        message_id=parcel.uuid or None, type=parcel.name or None, correlation_id=str(number),
    )

