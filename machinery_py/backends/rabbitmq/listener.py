"""Waiting for tasks to finish: the worker that ends one tells an exchange, which passes it on to who has asked for its UUID.

A Go worker tells nobody, and what is told while the connection is away is missed: so a waiter looks for himself as well, soon
at first and later once a second, at a few of the tasks that he waits for.
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
    settle,
)
from machinery_py.connections.rabbitmq.queue_records import QueueTransactions
from machinery_py.connections.rabbitmq.queues import FINISHED
from machinery_py.errors import MachineryError

FIRST = 0.05  # seconds until the first look
GROWTH = 1.5  # each pause is so much longer than the one before
PAUSE = 1.0  # seconds; the longest
FEW = 20  # tasks that one look asks for

#: Which of these tasks have finished.
Look = Callable[[Sequence[str]], Iterable[str]]


class AMQPListener(Listener):
    """A queue of its own, bound by the UUIDs that are watched."""

    def __init__(self, transactions: QueueTransactions, look: Look) -> None:
        self._transactions = transactions
        self._look = look
        self._lock = threading.Lock()
        self._binding = threading.Lock()
        self._watched: dict[str, str] = {}  # queue's name → UUID
        self._rung = threading.Event()
        self._channel: Channel | None = None
        self._queue = ""
        self._turn_of = itertools.count()

    def watch(self, uuids: Iterable[str]) -> None:
        new = {name_of(uuid): uuid for uuid in uuids}
        with self._lock:
            self._watched.update(new)
        self._bind(new)

    def _bind(self, names: Collection[str]) -> None:
        """Ask for these; who cannot looks for himself."""
        try:
            with self._binding, self._transactions.translated("waiting for results"):
                if self._channel is None or not self._channel.is_open:
                    self._subscribe()
                    with self._lock:
                        names = list(self._watched)
                assert self._channel is not None
                self._channel.ask(
                    lambda future: self._ask_for(names, future), self._transactions.driver.timeout
                )
        except (MachineryError, AmqpConnectionLost, ChannelLost):
            pass

    def _subscribe(self) -> None:
        timeout = self._transactions.driver.timeout
        channel = self._transactions.link().channel(timeout)
        self._queue = own_queue(channel, timeout)

        def told(_: object, method: Any, __: object, ___: bytes) -> None:
            with self._lock:
                watched = self._watched.pop(method.routing_key, None)
            if watched is not None:
                self._rung.set()

        channel.rpc(
            "basic_consume",
            queue=self._queue,
            on_message_callback=told,
            auto_ack=True,
            timeout=timeout,
        )
        self._channel = channel

    def _ask_for(self, names: Iterable[str], future: Future[Any]) -> None:
        assert self._channel is not None
        raw = self._channel.raw
        for name in names:
            raw.queue_bind(self._queue, FINISHED, name)  # without a callback nothing is waited for
        raw.queue_declare(self._queue, passive=True, callback=lambda _: settle(future, None))

    def unwatch(self, uuids: Iterable[str]) -> None:
        names = [name_of(uuid) for uuid in uuids]
        with self._lock:
            for name in names:
                self._watched.pop(name, None)
        channel, queue = self._channel, self._queue
        if channel is not None and channel.is_open:

            def let_go() -> None:
                for name in names:
                    channel.raw.queue_unbind(queue, FINISHED, name, callback=lambda _: None)

            channel.link.tell(let_go)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        pause = FIRST
        while not self._rung.wait(max(0.0, min(pause, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self._some_finished():
                break
            pause = min(PAUSE, pause * GROWTH)
        self._rung.clear()

    def _some_finished(self) -> bool:
        with self._lock:
            names = list(self._watched)
        if not names:
            return False
        if self._channel is None or not self._channel.is_open:
            self._bind(())
        start = next(self._turn_of) * FEW % len(names)
        few = names[start : start + FEW]
        with self._lock:
            uuids = [self._watched[name] for name in few if name in self._watched]
        try:
            finished = {name_of(uuid) for uuid in self._look(uuids)}
        except MachineryError:
            return False  # whoever waits reads the states himself, and is told then
        with self._lock:
            for name in finished:
                self._watched.pop(name, None)
        return bool(finished)

    def wake(self) -> None:
        self._rung.set()

    def close(self) -> None:
        self._rung.set()
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.close()
