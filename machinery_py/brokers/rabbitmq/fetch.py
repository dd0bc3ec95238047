"""Fetching messages from RabbitMQ queues, no more than are wanted.

A lasting subscription would hand over more messages than a worker can begin, and hold back what
others could run. So each fetch from classic queues subscribes with the wanted number as its
prefetch, and unsubscribes as soon as something came. While nothing is there the subscription
stands, and the first message ends it: an idle worker is woken by the server, not by polling.

Quorum queues are read with basic.get, one message after the other. When a node dies, a quorum queue
gives back what the subscribers there held, but not what they held of subscriptions that they had
ended: RabbitMQ 3.10 keeps that for them until the queue has another leader, even when the node is
back. So a subscription only wakes an idle worker: it brings one message, and ends when that is
settled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from pika import spec

from machinery_py.brokers.rabbitmq.messages import ReceivedMessage, received
from machinery_py.connections.rabbitmq.io_thread import Channel, resolve

MOST = 65_535  # the largest prefetch
LONGEST = 0.05  # seconds that a fetch by basic.get goes on once it has something

_tags = itertools.count(1)


class Fetch:
    """A fetch by subscription; `found` is what has come. All but `run` is for the I/O thread."""

    def __init__(
        self,
        channel: Channel,
        queues: Sequence[str],
        count: int,
        wait: float = 0.0,
        paused: Callable[[], Collection[str]] = tuple,
        *,
        keep: bool = False,
    ) -> None:
        """With several queues each gives one message at most.

        Args:
            paused: the queues that are passed over, asked when the fetch begins.
            keep: take one message, and leave the subscription that has brought it.
        """
        self._channel = channel
        self._queues = queues
        self._count = 1 if keep else count
        self._keep = keep
        self._wait = wait
        self._paused = paused
        self.found: list[ReceivedMessage] = []
        self._tags: list[str] = []
        self._uncancelled = 0
        self._begun = self._stopping = self._ended = False
        self._timer: object = None
        self._future: Future[list[ReceivedMessage]] | None = None

    def run(self, timeout: float) -> list[ReceivedMessage]:
        """Return what was there at once, or came within `wait`. From any thread but the I/O thread.

        Raises:
            AmqpConnectionLost, ChannelLost: what had come goes back to its queue.
        """
        found: list[ReceivedMessage] = self._channel.ask(self._begin, self._wait + timeout)
        return found

    def _begin(self, future: Future[list[ReceivedMessage]]) -> None:
        self._future, self._begun = future, True
        raw = self._channel.raw
        paused = self._paused()
        queues = [queue for queue in self._queues if queue not in paused]
        self._tags = [f"machinery.{next(_tags)}" for _ in queues]
        if queues:
            # pika sends each of these when the one before is answered.
            prefetch = min(self._count, MOST) if len(queues) == 1 else 1
            raw.basic_qos(prefetch_count=prefetch, callback=_ignore)
        for tag, queue in zip(self._tags, queues, strict=True):
            raw.basic_consume(queue, self._taker(queue, tag), consumer_tag=tag, callback=_ignore)
        if self._wait > 0 and not self._stopping:
            self._timer = raw.connection.ioloop.call_later(self._wait, self.end)
        else:
            self.end()

    def _taker(self, queue: str, tag: str) -> Callable[..., None]:
        def take(_: object, method: Any, properties: Any, body: bytes) -> None:
            self._channel.note(method.delivery_tag)
            one = received(queue, method, properties, body)
            if self._keep and not self._ended:
                one.subscription = tag
                self._tags.remove(tag)
            self.found.append(one)
            self.end()

        return take

    def end(self) -> None:
        """Unsubscribe; what is on its way is still taken."""
        self._stopping = True
        if self._ended or not self._begun:
            return
        self._ended = True
        if self._timer is not None:
            self._channel.raw.connection.ioloop.remove_timeout(self._timer)
        if not self._channel.is_open:
            return  # the future fails by itself
        if not self._tags and self._future is not None:
            resolve(self._future, self.found)
        self._uncancelled = len(self._tags)
        for tag in self._tags:
            self._channel.cancel(tag, self._cancelled)

    def _cancelled(self) -> None:
        self._uncancelled -= 1
        if not self._uncancelled and self._future is not None:
            resolve(self._future, self.found)

    def stop(self, then: Callable[[], object]) -> None:
        """End it, and call `then` when nothing more can come of it.

        A fetch that has not begun asks `paused` when it does.
        """
        if self._future is None:
            then()
            return
        self._future.add_done_callback(lambda _: then())
        self.end()


class Getter:
    """A channel for basic.get, one question at a time. Belongs to the I/O thread."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._queue = ""
        self._then: Callable[[ReceivedMessage | None], object] = _ignore
        empty = [spec.Basic.GetEmpty]
        channel.raw.add_callback(lambda _: self._answer(None), empty, one_shot=False)

    def ask(self, queue: str, then: Callable[[ReceivedMessage | None], object]) -> None:
        """Call `then` with the next message of a queue, or with None."""
        self._queue, self._then = queue, then
        self.channel.raw.basic_get(queue, self._got)

    def _got(self, _: object, method: Any, properties: Any, body: bytes) -> None:
        one = received(self._queue, method, properties, body)
        one.gotten = True
        self._answer(one)

    def _answer(self, one: ReceivedMessage | None) -> None:
        then, self._then = self._then, _ignore
        then(one)


class GetFetch(Fetch):
    """A fetch by basic.get, of what is there at once."""

    def __init__(
        self,
        getter: Getter,
        queue: str,
        count: int,
        paused: Callable[[], Collection[str]] = tuple,
    ) -> None:
        super().__init__(getter.channel, [queue], count, paused=paused)
        self._getter = getter
        self._until = 0.0

    def _begin(self, future: Future[list[ReceivedMessage]]) -> None:
        self._future, self._begun = future, True
        self._until = time.monotonic() + LONGEST
        if self._queues[0] in self._paused():
            self._stopping = True
        self._next()

    def _next(self) -> None:
        assert self._future is not None
        is_late = bool(self.found) and time.monotonic() > self._until
        if self._stopping or is_late or len(self.found) == self._count:
            resolve(self._future, self.found)
        else:
            self._getter.ask(self._queues[0], self._answered)

    def _answered(self, one: ReceivedMessage | None) -> None:
        if one is None:
            self._stopping = True
        else:
            self.found.append(one)
        self._next()

    def end(self) -> None:
        """Ask no more; what was asked for is still taken."""
        self._stopping = True


def drain(fetch: Callable[[int], Fetch], limit: int, timeout: float) -> list[ReceivedMessage]:
    """Return up to `limit` messages of a queue, unsettled, by as many fetches as it takes."""
    found: list[ReceivedMessage] = []
    while len(found) < limit and (more := fetch(limit - len(found)).run(timeout)):
        found += more
    return found


def _ignore(_: object) -> None:
    pass
