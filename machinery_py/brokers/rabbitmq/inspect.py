"""Inspection of RabbitMQ queues with plain AMQP: take all, read, and put back.

Each inspection has a connection of its own. What it took goes back to its place when the
connection ends, however it ends; a worker that asks in that moment gets it some milliseconds
later. One process inspects at a time: an exclusive queue is the lock, and goes with the
connection of its owner.

Counting takes nothing. But all queues share the delay levels. Whose the delayed messages are is
known if they were sent to one queue alone, else some are read: at most SAMPLE of each level, and
again when the counts have changed, or after SPLIT_LIFE.

Limits: a waiting message that was inspected counts as delivered once before (`redelivered`);
RabbitMQ has no other way. With more than SAMPLE messages in a level and several queues, the delayed
of each are an estimate, whose sum is right.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from machinery_py.bounds import PURGE_STEP, in_steps
from machinery_py.brokers.base import DeadLetter, Message
from machinery_py.brokers.rabbitmq.fetch import Fetch, GetFetch, Getter, drain
from machinery_py.brokers.rabbitmq.messages import (
    LATE,
    QUEUE,
    ReceivedMessage,
    letter_of,
    message_of,
)
from machinery_py.brokers.rabbitmq.topology import LEVELS, Topology
from machinery_py.connections.rabbitmq.client import LOCKED, NOT_FOUND, AmqpDriver
from machinery_py.connections.rabbitmq.io_thread import Channel, ChannelLost, resolve
from machinery_py.connections.rabbitmq.queues import LOOKING
from machinery_py.errors import BrokerUnavailable

ALL = 1_000_000  # messages; as many as are there
SAMPLE = 200  # messages
SPLIT_LIFE = 10.0  # seconds


class DelayedSplit:
    """The delayed messages of each queue, as they were last read."""

    def __init__(self) -> None:
        self.counts: Sequence[int] = ()  # of the levels
        self.until: float = 0.0
        self.by_queue: Counter[str] = Counter()


class Inspection:
    """Questions about the queues of a server, on one channel. Its end puts back what was taken."""

    def __init__(self, channel: Channel, topology: Topology, timeout: float) -> None:
        self._channel = channel
        self._topology = topology
        self._timeout = timeout

    def take(self, queue: str, limit: int = ALL) -> list[ReceivedMessage]:
        """Take messages of a queue, if it is there."""
        return self._drained(queue, limit) if self.count(queue) else []

    def delayed(self) -> Iterator[ReceivedMessage]:
        for level in range(LEVELS):
            yield from self.take(self._topology.level_name(level))

    def letters(self, queues: Sequence[str]) -> Iterator[tuple[ReceivedMessage, DeadLetter]]:
        for queue in queues:
            for one in self.take(self._topology.dead_queue(queue)):
                yield one, letter_of(one)

    def delete(self, messages: Sequence[ReceivedMessage]) -> None:
        """Delete messages that were taken."""
        self._channel.settle([(one.tag, True) for one in messages], self._timeout)

    def purge(self, queue: str) -> int:
        """Delete what waits in a queue, and what is delayed for it."""
        if self.count(queue) is None or queue not in self.queues()[0]:
            return 0  # or it is another program's
        frame = self._channel.rpc("queue_purge", queue=queue, timeout=self._timeout)
        delayed = [one for one in self.delayed() if one.text(QUEUE) == queue]
        self.delete(delayed)
        return int(frame.method.message_count) + len(delayed)

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        """Delete as `purge`; messages of each step are taken, shown to `before`, and deleted."""
        left = self.count(queue) or 0
        # Before `before` sends others to it, late.
        delayed = [one for one in self.delayed() if one.text(QUEUE) == queue]
        for some in in_steps(delayed, PURGE_STEP):
            messages = [message_of(one, queue=queue) for one in some]
            before(messages)
            self.delete(some)
            yield messages
        while left > 0 and (found := self._drained(queue, min(left, PURGE_STEP))):
            left -= len(found)
            messages = [message_of(one) for one in found]
            before(messages)
            self.delete(found)
            yield messages

    def queues(self) -> tuple[list[str], list[str]]:
        """Return all queues that were ever used, and those to which delayed messages were sent."""
        seen: set[tuple[str, bool]] = set()
        spare: list[ReceivedMessage] = []
        for one in self.take(self._topology.registry):
            note = one.body.decode(errors="replace"), bool(one.headers.get(LATE))
            if note in seen:
                spare.append(one)
            seen.add(note)
        self.delete(spare)
        return sorted({name for name, _ in seen}), sorted(name for name, late in seen if late)

    def count(self, queue: str) -> int | None:
        """Return how many messages wait in a queue; None if there is no such queue."""
        return next(iter(self._counts([queue])), None)

    def count_delayed(self, queues: Sequence[str], split: DelayedSplit) -> Counter[str]:
        """Return the delayed messages of each of the queues to which any were ever sent."""
        levels = [self._topology.level_name(level) for level in range(LEVELS)]
        counts = self._counts(levels)
        if not any(counts):
            return Counter()
        if len(queues) == 1:
            return Counter({queues[0]: sum(counts)})
        if split.counts != counts or split.until < time.monotonic():
            shares: dict[str, float] = {}
            for level, count in zip(levels, counts, strict=True):
                some = self._drained(level, min(count, SAMPLE))
                for one in some:
                    queue = one.text(QUEUE)
                    shares[queue] = shares.get(queue, 0.0) + count / len(some)
            split.by_queue = Counter({queue: round(share) for queue, share in shares.items()})
            split.counts, split.until = counts, time.monotonic() + SPLIT_LIFE
        return split.by_queue

    def _drained(self, queue: str, limit: int) -> list[ReceivedMessage]:
        getter = Getter(self._channel) if self._topology.is_quorum else None

        def fetch(count: int) -> Fetch:
            if getter is not None:
                return GetFetch(getter, queue, count)
            return Fetch(self._channel, [queue], count)

        return drain(fetch, limit, self._timeout)

    def _counts(self, queues: Sequence[str]) -> list[int]:
        """Return how many messages wait in each, asked in one go; nothing if one is not there."""
        probe = self._channel.link.channel(self._timeout)  # which a wrong name ends
        found: list[int] = []

        def begin(future: Future[Any]) -> None:
            def counted(frame: Any) -> None:
                found.append(frame.method.message_count)
                if len(found) == len(queues):
                    resolve(future, None)

            for queue in queues:
                probe.raw.queue_declare(queue, passive=True, callback=counted)

        try:
            probe.ask(begin, self._timeout)
        except ChannelLost as error:
            if error.code == NOT_FOUND:
                return []
            raise
        probe.close()
        return found


@contextmanager
def inspecting(driver: AmqpDriver, topology: Topology, doing: str) -> Iterator[Inspection]:
    """An inspection, while no other process inspects.

    Raises:
        BrokerUnavailable, StoreUnusable: as AmqpDriver.visit, or another has inspected for too
        long.
    """
    timeout = driver.timeout
    with driver.visit(doing) as channel:
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while not _locked(channel, timeout):
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"RabbitMQ at {driver.place}: {doing}: another process has been inspecting"
                    f" for {timeout:g} s"
                )
            pause.wait(0.02)
        yield Inspection(channel, topology, timeout)


def _locked(channel: Channel, timeout: float) -> bool:
    owner = channel.link.channel(timeout)
    try:
        owner.rpc("queue_declare", queue=LOOKING, exclusive=True, timeout=timeout)
    except ChannelLost as error:
        if error.code == LOCKED:
            return False
        raise
    return True
