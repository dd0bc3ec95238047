"""Taking messages from RabbitMQ queues, no more than are wanted: subscribe, collect, unsubscribe.

A lasting subscription would hand over more messages than a worker can begin, and hold back what others could run. So each
claim subscribes with the wanted number as its prefetch, and ends the subscription as soon as something came. While nothing
is there the subscription stands, and the first message ends it: a sleeping worker is woken by the server, not by polling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from machinery_py.brokers.rabbitmq.messages import Taken, taken
from machinery_py.connections.rabbitmq.io_thread import Channel, settle

MOST = 65_535  # what a prefetch can say

_tags = itertools.count(1)


class Fetch:
    """One claim under way; `found` is what has come. Everything but `run` happens in the link's thread."""

    def __init__(
        self,
        channel: Channel,
        queues: Sequence[str],
        count: int,
        wait: float,
        shut: Callable[[], Collection[str]] = tuple,
        *,
        keep: bool = False,
    ) -> None:
        """With several queues each gives one message at most. `shut`: those that are passed over, when it begins.

        `keep`: take one message, and do not end the subscription that has brought it, see amqp_gets.
        """
        self._channel = channel
        self._queues = queues
        self._count = 1 if keep else count
        self._keep = keep
        self._wait = wait
        self._shut = shut
        self.found: list[Taken] = []
        self._tags: list[str] = []
        self._left = 0
        self._begun = self._wanted = self._ended = False
        self._timer: object = None
        self._future: Future[list[Taken]] | None = None

    def run(self, timeout: float) -> list[Taken]:
        """Return what was there at once, or came within `wait`. Called from any thread but the link's.

        Raises:
            LinkLost, ChannelLost: what had come belongs to nobody, and goes back.
        """
        found: list[Taken] = self._channel.ask(self._begin, self._wait + timeout)
        return found

    def _begin(self, future: Future[list[Taken]]) -> None:
        self._future = future
        self._begun = True
        raw = self._channel.raw
        shut = self._shut()
        queues = [queue for queue in self._queues if queue not in shut]
        self._tags = [f"machinery.{next(_tags)}" for _ in queues]
        if queues:
            # pika sends each of these when the one before is answered.
            raw.basic_qos(
                prefetch_count=min(self._count, MOST) if len(queues) == 1 else 1, callback=_nothing
            )
        for tag, queue in zip(self._tags, queues, strict=True):
            raw.basic_consume(queue, self._taker(queue, tag), consumer_tag=tag, callback=_nothing)
        if self._wait > 0 and not self._wanted:
            self._timer = raw.connection.ioloop.call_later(self._wait, self.end)
        else:
            self.end()

    def _taker(self, queue: str, tag: str) -> Callable[..., None]:
        def take(_: object, method: Any, properties: Any, body: bytes) -> None:
            self._channel.note(method.delivery_tag)
            one = taken(queue, method, properties, body)
            if self._keep and not self._ended:
                one.subscription = tag
                self._tags.remove(tag)
            self.found.append(one)
            self.end()

        return take

    def end(self) -> None:
        """Unsubscribe; what is on its way is still taken."""
        self._wanted = True
        if self._ended or not self._begun:
            return
        self._ended = True
        if self._timer is not None:
            self._channel.raw.connection.ioloop.remove_timeout(self._timer)
        if not self._channel.is_open:
            return  # the future fails by itself
        if not self._tags and self._future is not None:
            settle(self._future, self.found)
        self._left = len(self._tags)
        for tag in self._tags:
            self._channel.cancel(tag, self._unsubscribed)

    def stop(self, then: Callable[[], object]) -> None:
        """End it, and call `then` when nothing more can come of it. One that has not begun looks at `shut` when it does."""
        if self._future is None:
            then()
            return
        self._future.add_done_callback(lambda _: then())
        self.end()

    def _unsubscribed(self) -> None:
        self._left -= 1
        if not self._left and self._future is not None:
            settle(self._future, self.found)


def drained(
    channel: Channel,
    queue: str,
    limit: int,
    timeout: float,
    shut: Callable[[], Collection[str]] = tuple,
) -> list[Taken]:
    """Up to `limit` messages of a queue, unsettled on this channel: closing it puts them back in their places."""
    found: list[Taken] = []
    while len(found) < limit:
        more = Fetch(channel, [queue], limit - len(found), 0.0, shut).run(timeout)
        if not more:
            break
        found += more
    return found


def _nothing(_: object) -> None:
    pass
