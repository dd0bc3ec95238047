"""Taking messages one by one, as it is done with quorum queues.

When a node dies, a quorum queue gives back what the subscribers there held, but not what they held of subscriptions that they
had ended: RabbitMQ 3.10 keeps that for them until the queue has another leader, even when the node is back. Claims that
end their subscription would leave tasks there. So messages are asked for, one after the other, and a subscription only
wakes who found nothing: it brings one message, and is ended when that is settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from pika import spec

from machinery_py.brokers.rabbitmq.fetch import Fetch
from machinery_py.brokers.rabbitmq.messages import Taken, taken
from machinery_py.connections.rabbitmq.io_thread import Channel, settle

LONGEST = 0.05  # seconds that a claim asks on; what it has by then should not wait longer


class Getter:
    """A channel for questions: `ask` and its answer. Used in the link's thread."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._queue = ""
        self._then: Callable[[Taken | None], object] | None = None
        channel.raw.add_callback(
            lambda _: self._answer(None), [spec.Basic.GetEmpty], one_shot=False
        )

    def ask(self, queue: str, then: Callable[[Taken | None], object]) -> None:
        """Call `then` with the next message of a queue, or with None."""
        self._queue, self._then = queue, then
        self.channel.raw.basic_get(queue, self._got)

    def _got(self, _: object, method: Any, properties: Any, body: bytes) -> None:
        one = taken(self._queue, method, properties, body)
        one.gotten = True
        self._answer(one)

    def _answer(self, one: Taken | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(one)


class GetClaim(Fetch):
    """A claim of what is there at once."""

    def __init__(
        self,
        getter: Getter,
        queue: str,
        count: int,
        shut: Callable[[], Collection[str]] = tuple,
    ) -> None:
        super().__init__(getter.channel, [queue], count, 0.0, shut)
        self._getter = getter
        self._until = 0.0

    def _begin(self, future: Future[list[Taken]]) -> None:
        self._future, self._begun = future, True
        self._until = time.monotonic() + LONGEST
        if self._queues[0] in self._shut():
            self._wanted = True
        self._next()

    def _next(self) -> None:
        assert self._future is not None
        if (
            self._wanted
            or len(self.found) == self._count
            or (self.found and time.monotonic() > self._until)
        ):
            settle(self._future, self.found)
        else:
            self._getter.ask(self._queues[0], self._answered)

    def _answered(self, one: Taken | None) -> None:
        if one is None:
            self._wanted = True
        else:
            self.found.append(one)
        self._next()

    def end(self) -> None:
        """Ask no more; what was asked for is still taken."""
        self._wanted = True


def gotten(getter: Getter, queue: str, limit: int, timeout: float) -> list[Taken]:
    """As `drained`."""
    found: list[Taken] = []
    while len(found) < limit:
        more = GetClaim(getter, queue, limit - len(found)).run(timeout)
        if not more:
            break
        found += more
    return found
