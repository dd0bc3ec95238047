"""Taking all that lies in some queues, many requests at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from pika import spec

from machinery_py.connections.rabbitmq.io_thread import Channel, resolve

EACH = 0.02  # seconds more for each queue of a long list
AHEAD = 200  # requests that are on their way together


class UnsettledMessage(NamedTuple):
    """A message that was taken and is not settled."""

    tag: int
    body: bytes


class QueueReader:
    """Takes all messages of queues on a channel, by pipelined requests.

    pika would have each request wait for the answer to the one before. A test names its members
    that this touches.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._on_empty: Callable[[], object] = _ignore
        channel.raw.add_callback(lambda _: self._on_empty(), [spec.Basic.GetEmpty], one_shot=False)

    def all(self, queues: Iterable[str], timeout: float) -> dict[str, list[UnsettledMessage]]:
        """Return all messages that are there. Raises AmqpConnectionLost, ChannelLost."""
        found: dict[str, list[UnsettledMessage]] = {queue: [] for queue in queues}
        asked, more = deque[str](), deque(found)
        raw = self.channel.raw

        def begin(future: Future[Any]) -> None:
            def ask() -> None:
                while more and len(asked) < AHEAD:
                    asked.append(more.popleft())
                    raw._send_method(spec.Basic.Get(queue=asked[-1], no_ack=False))
                if asked:
                    raw._on_getok_callback = got
                else:
                    resolve(future, None)

            def got(_: object, method: Any, __: object, body: bytes) -> None:
                queue = asked.popleft()
                found[queue].append(UnsettledMessage(method.delivery_tag, body))
                if method.message_count:
                    more.append(queue)
                ask()

            def empty() -> None:
                asked.popleft()
                ask()

            self._on_empty = empty
            ask()

        if found:
            self.channel.ask(begin, timeout + EACH * len(found))
        return found


def _ignore() -> None:
    pass
