"""Publishing with confirms: all messages of a call are on their way together.

A message ends in one of these ways:

    confirmed    a queue has it, on disk if it is durable
    returned     no queue took it; it is nowhere
    refused      the server said no (a full queue that rejects); it is nowhere
    unknown      the connection ended, or nothing was said in time

The server confirms messages by the number that each has on its channel. A message is `mandatory`:
one that no queue takes comes back before its confirm, and is known by its correlation id, the
number of the batch and its place in it; the server says nothing else of it.

The thread that publishes encodes and writes, a piece at a time (with TLS, the I/O thread writes);
the I/O thread hears the confirms. So the server is at the first messages of a large batch while the
last are encoded. Any number of threads publish side by side, and none waits for another's confirms.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import pika

from machinery_py.connections.rabbitmq.frames import AddressedMessage, Writer
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    resolve,
)

CHUNK = 250  # messages written in one go: other threads, and heartbeats, come in between
PIECE = 65_536  # bytes, about, of one system call


class Confirmation(Enum):
    """How the publishing of a message ended."""

    UNKNOWN = "unknown"
    CONFIRMED = "confirmed"
    RETURNED = "returned"
    REFUSED = "refused"


class Batch:
    """Messages on their way. `ends` has one entry for each; `failure` says why some are unknown."""

    def __init__(self, number: int, messages: Sequence[AddressedMessage]) -> None:
        self.number = number
        self.messages = messages
        self.ends: list[Confirmation] = [Confirmation.UNKNOWN] * len(messages)
        self.failure: Exception | None = None
        self._left = len(messages)
        self._heard_at = 0.0
        self._over = threading.Lock()  # released when the waiting is over
        self._over.acquire()

    @property
    def is_over(self) -> bool:
        """Whether all ends are known."""
        return not self._left

    def note(self, first: int, last: int, end: Confirmation) -> None:
        """Note the end of the messages from `first` to `last` that have none; in the I/O thread."""
        ends = self.ends
        for index in range(first, last + 1):
            if ends[index] is Confirmation.UNKNOWN:
                ends[index] = end
                self._left -= 1
        if self._left:
            # A part of the confirms wakes nobody: what was heard is read when the time is over.
            self._heard_at = time.monotonic()
        else:
            self._release()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was over before
            self._over.release()

    def wait(self, timeout: float) -> bool:
        """Whether all ends are known; gives up when nothing was heard for `timeout` seconds."""
        self._heard_at = time.monotonic()
        while (
            self._left
            and self.failure is None
            and (left := self._heard_at + timeout - time.monotonic()) > 0
        ):
            self._over.acquire(timeout=left)
        return not self._left


@dataclass(slots=True)
class _Run:
    """Messages of a batch that were written together, and so have consecutive numbers.

    Attributes:
        index: of the message whose number is `first`.
        low: all below it have an end.
    """

    batch: Batch
    index: int
    first: int
    last: int
    low: int


class Confirms:
    """The messages on one channel that are not confirmed.

    Attributes:
        lock: to be held for each call. A message must be numbered before its confirm is heard.
    """

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self._runs: deque[_Run] = deque()
        self._next = 1

    def wrote(self, batch: Batch, index: int, count: int) -> None:
        """Number `count` messages of the batch, from that index on: they were written."""
        first, self._next = self._next, self._next + count
        self._runs.append(_Run(batch, index, first, self._next - 1, low=first))

    def hear(self, number: int, end: Confirmation, *, multiple: bool) -> None:
        """Note the end of a message, or with `multiple` of all up to it that have none yet."""
        runs = self._runs
        for run in runs:
            if run.first > number:
                break
            first, last = run.low if multiple else number, min(number, run.last)
            if first <= last:
                run.batch.note(run.index + first - run.first, run.index + last - run.first, end)
                if first == run.low:
                    run.low = last + 1
        while runs and (runs[0].low > runs[0].last or runs[0].batch.is_over):
            runs.popleft()

    def clear(self) -> None:
        self._runs.clear()


class Publisher:
    """A channel in confirm mode on a connection of its own. May be used from any thread."""

    def __init__(self, link: AmqpConnection, timeout: float) -> None:
        self.link = link
        self._timeout = timeout
        self._confirms = Confirms()
        self._batches: dict[int, Batch] = {}  # that a thread waits for
        self._numbers = itertools.count(1)
        self._retired = False
        self._is_torn = False  # a write has not come to its end; under the lock of the confirms
        self.channel: Channel = link.channel(timeout)
        self.channel.watch(self._on_lost)
        raw = self.channel.raw
        self._writer = Writer(raw.channel_number, raw.connection.most)
        self._is_shared = raw.connection.is_shared
        self.channel.ask(self._set_up, timeout)

    def _set_up(self, future: Future[Any]) -> None:
        raw = self.channel.raw
        raw.add_on_return_callback(self._on_return)
        raw.confirm_delivery(self._on_confirm, callback=lambda _: resolve(future, None))
        raw.connection.hear_confirms(raw.channel_number, self._hear)

    @property
    def is_open(self) -> bool:
        return self.channel.is_open

    def publish(self, messages: Sequence[AddressedMessage]) -> Batch:
        """Publish, and return when all ends are known, or no more will be."""
        batch = self.begin(messages)
        try:
            self.wait(batch)
        finally:
            self.end(batch)
        return batch

    def begin(self, messages: Sequence[AddressedMessage]) -> Batch:
        """Send messages on their way. The caller must `end` the batch."""
        batch = Batch(next(self._numbers), messages)
        self._batches[batch.number] = batch
        try:
            self._send(batch)
        except BaseException:
            self.end(batch)
            raise
        return batch

    def wait(self, batch: Batch) -> None:
        """Return when all ends of the batch are known, or no more will be."""
        if not batch.wait(self._timeout) and batch.failure is None and not self.link.blocked:
            self.link.abort()  # it may lead nowhere; the next call uses another

    def end(self, batch: Batch) -> None:
        """Take no more notice of the batch."""
        self._batches.pop(batch.number, None)
        self._close_if_done()

    def retire(self) -> None:
        """Take nothing new; close when what is on its way has come to an end."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self._batches:
            self.link.close()

    def _send(self, batch: Batch) -> None:
        for start in range(0, len(batch.messages), CHUNK):
            chunk = batch.messages[start : start + CHUNK]
            try:
                pieces = self._encoded(chunk, batch.number, start)
            except Exception as error:  # pika's and others, for what cannot be written
                batch.fail(error)
                return
            write = functools.partial(self._write, batch, start, len(chunk), pieces)
            if self._is_shared:
                write()
            else:
                self.link.tell(write)
        if not self.is_open:
            batch.fail(self.channel.lost or AmqpConnectionLost("closed"))

    def _encoded(self, chunk: Sequence[AddressedMessage], number: int, start: int) -> list[bytes]:
        """Return the frames of the messages, in pieces that one system call can write."""
        pieces: list[bytes] = []
        frames: list[bytes] = []
        size = 0
        for index, message in enumerate(chunk, start):
            frames += self._writer.message(message, f"{number}.{index}")
            size += len(message.body)
            if size >= PIECE:
                pieces.append(b"".join(frames))
                frames, size = [], 0
        if frames:
            pieces.append(b"".join(frames))
        return pieces

    def _write(self, batch: Batch, start: int, count: int, pieces: Sequence[bytes]) -> None:
        """Write a chunk.

        If that is cut off, be it by Ctrl-C, a part of it may have been sent that has no number:
        the confirms of all that came behind would be taken for those of others.
        """
        try:
            with self._confirms.lock:
                if self._is_torn:
                    raise AmqpConnectionLost("dropped")
                self._is_torn = True
                self.channel.write(pieces)
                self._confirms.wrote(batch, start, count)
                self._is_torn = False
        except BaseException as error:
            self.link.abort()
            if not isinstance(error, Exception):
                raise
            batch.fail(error)  # a channel that is closing or lost

    def tell(self, queue: str, body: bytes, correlation_id: str) -> None:
        """Send an answer that may be lost; on a channel of its own, without confirms."""

        def answer(raw: Any) -> None:
            raw.basic_publish("", queue, body, pika.BasicProperties(correlation_id=correlation_id))
            raw.close()

        self.link.tell(lambda: self.channel.raw.connection.channel(on_open_callback=answer))

    def _on_confirm(self, frame: Any) -> None:
        """Hear a confirm that pika has read."""
        method = frame.method
        self._hear(method.delivery_tag, method.multiple, method.NAME == "Basic.Ack")

    def _hear(self, number: int, multiple: bool, is_stored: bool) -> None:
        end = Confirmation.CONFIRMED if is_stored else Confirmation.REFUSED
        with self._confirms.lock:
            self._confirms.hear(number, end, multiple=multiple)

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        number, _, index = str(properties.correlation_id or "").partition(".")
        batch = self._batches.get(int(number or 0))
        if batch is not None and index:
            batch.note(int(index), int(index), Confirmation.RETURNED)

    def _on_lost(self, error: Exception) -> None:
        with self._confirms.lock:
            self._confirms.clear()
        for batch in list(self._batches.values()):
            batch.fail(error)

    def close(self) -> None:
        self.link.close()
