"""Receiving of one consumer: fetches one queue after the other, then waits on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from machinery_py.brokers.rabbitmq.control import decode_order
from machinery_py.brokers.rabbitmq.fetch import Fetch, GetFetch, drain
from machinery_py.brokers.rabbitmq.holding import ConsumerConnection
from machinery_py.brokers.rabbitmq.messages import ReceivedMessage
from machinery_py.values.malformed import MALFORMED

FULL_BURST = 100  # messages; RabbitMQ hands over some 200 in one go, though more are there


class MessageReceiver:
    """The fetches of one consumer, and the paused queues, which they pass over.

    Attributes:
        paused: changed in the I/O thread alone, where fetches begin.
        version: grows with each change of `paused`.
        fetch: under way now.
        woken: the next wait, or the one under way, ends at once.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.paused: frozenset[str] = frozenset()
        self.version: int = 0
        self.fetch: Fetch | None = None
        self.woken: bool = False

    def receive(
        self, connection: ConsumerConnection, queues: Sequence[str], limit: int, timeout: float
    ) -> list[ReceivedMessage]:
        """Return what is there at once, or comes within `timeout`, except from paused queues.

        Raises:
            AmqpConnectionLost, ChannelLost: what had come goes back.
        """
        left, until = timeout, time.monotonic() + timeout
        while True:
            version, found = self.version, list[ReceivedMessage]()
            if len(queues) > 1:
                for queue in queues:
                    if len(found) < limit and queue not in self.paused:
                        found += self._fetch(connection, [queue], limit - len(found), 0.0)
            if not found and (left > 0 or len(queues) == 1):
                found = self._fetch(connection, queues, limit, left)
            left = until - time.monotonic()
            if found or left <= 0 or self.woken or version == self.version:
                break  # else a queue was paused or resumed, and that ended the wait
        self.woken = False
        return found

    def _fetch(
        self, connection: ConsumerConnection, queues: Sequence[str], limit: int, wait: float
    ) -> list[ReceivedMessage]:
        channel, getter, is_one = connection.main, connection.getter, len(queues) == 1
        if getter is None:
            found = self._run(Fetch(channel, queues, limit, wait, self._paused))
            if FULL_BURST <= len(found) < limit and is_one:
                found += drain(
                    lambda count: Fetch(channel, queues, count, paused=self._paused),
                    limit - len(found),
                    self._timeout,
                )
            return found
        found = self._run(GetFetch(getter, queues[0], limit, self._paused)) if is_one else []
        if not found and wait > 0:
            found = self._run(Fetch(channel, queues, 1, wait, self._paused, keep=True))
            if found and is_one and limit > 1:
                found += self._run(GetFetch(getter, queues[0], limit - 1, self._paused))
        return found

    def _run(self, fetch: Fetch) -> list[ReceivedMessage]:
        self.fetch = fetch
        if self.woken:
            fetch.end()
        try:
            return fetch.run(self._timeout)
        finally:
            self.fetch = None

    def _paused(self) -> frozenset[str]:
        return self.paused

    # Paused queues: in the I/O thread

    def hear(self, body: bytes, answer: Callable[[], object]) -> None:
        """Obey a message to all consumers; answer when no fetch contradicts it any more."""
        try:
            order = decode_order(body)
        except MALFORMED:
            answer()  # only a question
            return
        queue = {order.queue}
        self._change(self.paused | queue if order.shut else self.paused - queue, answer)

    def learn(self, marked: Collection[str], version: int) -> None:
        """Note the marked queues, unless an order has come since `version`, which is newer."""
        if version == self.version and self.paused != frozenset(marked):
            self._change(frozenset(marked), lambda: None)

    def _change(self, paused: frozenset[str], then: Callable[[], object]) -> None:
        self.paused = paused
        self.version += 1
        if self.fetch is None:
            then()
        else:
            self.fetch.stop(then)
