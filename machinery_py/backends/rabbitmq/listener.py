"""Waiting for tasks to finish: the worker that ends a task publishes its UUID to an exchange.

A Go worker publishes nothing there, and messages are missed while the connection is away: so a
waiter also looks at a few of its tasks, soon at first and later once a second.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from machinery_py.backends.base import Listener
from machinery_py.backends.rabbitmq.documents import name_of
from machinery_py.backends.rabbitmq.revocations import own_queue
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnectionLost,
    Channel,
    ChannelLost,
    resolve,
)
from machinery_py.connections.rabbitmq.queue_records import QueueTransactions
from machinery_py.connections.rabbitmq.queues import FINISHED
from machinery_py.errors import MachineryError

FIRST = 0.05  # seconds until the first look
GROWTH = 1.5  # each pause is so much longer than the one before
PAUSE = 1.0  # seconds; the longest
FEW = 20  # tasks that one look asks for

#: Return those of these tasks that have finished.
Look = Callable[[Sequence[str]], Iterable[str]]


class AMQPListener(Listener):
    """A listener with a queue of its own, bound by the UUIDs that are watched."""

    def __init__(self, transactions: QueueTransactions, look: Look) -> None:
        self._transactions = transactions
        self._look = look
        self._lock = threading.Lock()
        self._binding = threading.Lock()
        self._watched: dict[str, str] = {}  # queue's name → UUID
        self._woken = threading.Event()
        self._channel: Channel | None = None
        self._queue = ""
        self._looks = itertools.count()

    def watch(self, uuids: Iterable[str]) -> None:
        new = {name_of(uuid): uuid for uuid in uuids}
        with self._lock:
            self._watched.update(new)
        self._bind(new)

    def _bind(self, names: Collection[str]) -> None:
        """Bind the queue by these names; if that fails, `wait` finds out by reading states."""
        timeout = self._transactions.driver.timeout
        try:
            with self._binding, self._transactions.translated("waiting for results"):
                channel = self._channel
                if channel is None or not channel.is_open:
                    channel = self._channel = self._subscribed(timeout)
                    with self._lock:
                        names = list(self._watched)
                raw = channel.raw

                def bind(future: Future[Any]) -> None:
                    for name in names:
                        raw.queue_bind(self._queue, FINISHED, name)  # no callback: not waited for
                    raw.queue_declare(
                        self._queue, passive=True, callback=lambda _: resolve(future, None)
                    )

                channel.ask(bind, timeout)
        except (MachineryError, AmqpConnectionLost, ChannelLost):
            pass

    def _subscribed(self, timeout: float) -> Channel:
        channel = self._transactions.link().channel(timeout)
        self._queue = own_queue(channel, timeout)

        def told(_: object, method: Any, __: object, ___: bytes) -> None:
            if self._forget([method.routing_key]):
                self._woken.set()

        channel.rpc(
            "basic_consume",
            queue=self._queue,
            on_message_callback=told,
            auto_ack=True,
            timeout=timeout,
        )
        return channel

    def _forget(self, names: Iterable[str]) -> bool:
        """Watch these no more; return whether one of them was watched."""
        with self._lock:
            found = [self._watched.pop(name, None) for name in names]
        return any(found)

    def unwatch(self, uuids: Iterable[str]) -> None:
        names = [name_of(uuid) for uuid in uuids]
        self._forget(names)
        channel, queue = self._channel, self._queue
        if channel is not None and channel.is_open:

            def unbind() -> None:
                for name in names:
                    channel.raw.queue_unbind(queue, FINISHED, name, callback=lambda _: None)

            channel.link.tell(unbind)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        pause = FIRST
        while not self._woken.wait(max(0.0, min(pause, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self._some_finished():
                break
            pause = min(PAUSE, pause * GROWTH)
        self._woken.clear()

    def _some_finished(self) -> bool:
        with self._lock:
            watched = list(self._watched.items())
        if not watched:
            return False
        if self._channel is None or not self._channel.is_open:
            self._bind(())
        start = next(self._looks) * FEW % len(watched)
        try:
            finished = self._look([uuid for _, uuid in watched[start : start + FEW]])
        except MachineryError:
            return False  # the waiter reads the states itself, and gets the error then
        return self._forget([name_of(uuid) for uuid in finished])

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._woken.set()
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.close()
