"""Looking into RabbitMQ queues with plain AMQP: take all, read, and put back; of dead letters, some are taken for good.

Each look has a connection of its own. What it took goes back to its place when the connection ends, however it ends. While it
looks, the messages are in its hands: a worker that asks in that moment gets them some milliseconds later. One process looks
at a time: an exclusive queue is the lock, and goes with the connection of its owner.

Limits: a waiting message that was looked at counts as delivered once before (`redelivered`). RabbitMQ has no other way.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from machinery_py._drivers.amqp import AmqpDriver
from machinery_py._drivers.amqp_link import Channel, ChannelLost, settle
from machinery_py.brokers.amqp_claims import drained
from machinery_py.brokers.amqp_messages import QUEUE, Taken, letter_of, message_of
from machinery_py.brokers.amqp_presence import Report, ask
from machinery_py.brokers.amqp_topology import LEVELS, REGISTRY, Topology
from machinery_py.brokers.base import DeadLetter, Message, QueueStats
from machinery_py.errors import BrokerUnavailable

ALL = 1_000_000  # messages; as many as are there
LOCK = "machinery.lock.looking"
NOT_FOUND, LOCKED = 404, 405


class Looking:
    """The questions to a server. May be used from any thread."""

    def __init__(self, driver: AmqpDriver, topology: Topology) -> None:
        self._driver = driver
        self._topology = topology

    # Messages

    def pending(self, queue: str, limit: int) -> list[Message]:
        with self._looking(f"listing {queue!r}") as channel:
            return [message_of(one) for one in self._taken(channel, queue, limit)]

    def delayed(self, limit: int) -> list[Message]:
        with self._looking("listing delayed messages") as channel:
            found = [message_of(one, queue=one.text(QUEUE)) for one in self._late(channel)]
        found.sort(key=lambda message: message.eta or self._driver.clock.now())
        return found[:limit]

    def _late(self, channel: Channel) -> Iterator[Taken]:
        for level in range(LEVELS):
            yield from self._taken(channel, self._topology.level_name(level), ALL)

    def purge(self, queue: str) -> int:
        """Delete what waits in a queue, and what is delayed for it."""
        with self._looking(f"purging {queue!r}") as channel:
            if self._count(channel, queue) is None:
                return 0
            frame = channel.rpc("queue_purge", queue=queue, timeout=self._driver.timeout)
            late = [one.tag for one in self._late(channel) if one.text(QUEUE) == queue]
            self._acknowledge(channel, late)
            return int(frame.method.message_count) + len(late)

    # Dead letters

    def dead_letters(self, queues: Sequence[str], limit: int) -> list[DeadLetter]:
        with self._looking("listing dead letters") as channel:
            letters = {letter.id: letter for _, letter in self._letters(channel, queues)}
        return sorted(letters.values(), key=_age, reverse=True)[:limit]

    def take_dead(self, queues: Sequence[str], ids: Sequence[str]) -> list[DeadLetter]:
        with self._looking("taking dead letters") as channel:
            wanted = set(ids)
            found = [(one, letter) for one, letter in self._letters(channel, queues) if letter.id in wanted]
            self._acknowledge(channel, [one.tag for one, _ in found])
        letters = {letter.id: letter for _, letter in found}
        return [letters[id] for id in dict.fromkeys(ids) if id in letters]

    def _letters(self, channel: Channel, queues: Sequence[str]) -> Iterator[tuple[Taken, DeadLetter]]:
        for queue in queues:
            for one in self._taken(channel, self._topology.dead_queue(queue), ALL):
                yield one, letter_of(one)

    # Queues and workers

    def queues(self) -> list[str]:
        """Every queue that was ever used. Names that are noted twice are thinned out."""
        with self._looking("listing queues") as channel:
            return self._queues(channel)

    def _queues(self, channel: Channel) -> list[str]:
        seen: set[str] = set()
        spare: list[int] = []
        for one in self._taken(channel, REGISTRY, ALL):
            name = one.body.decode(errors="replace")
            if name in seen:
                spare.append(one.tag)
            seen.add(name)
        self._acknowledge(channel, spare)
        return sorted(seen)

    def reports(self) -> Sequence[Report]:
        with self._driver.visit("listing workers") as channel:
            try:
                return ask(channel, self._driver.timeout)
            except ChannelLost as error:
                if error.code == NOT_FOUND:
                    return []  # nothing was ever declared
                raise

    def stats(self) -> list[QueueStats]:
        with self._looking("counting messages") as channel:
            late = Counter(one.text(QUEUE) for one in self._late(channel))
            waiting = {queue: self._count(channel, queue) or 0 for queue in self._queues(channel)}
            dead = {queue: self._count(channel, self._topology.dead_queue(queue)) or 0 for queue in waiting}
        # Last: what is on its way from the queue to a worker is rather counted twice than not at all.
        running: Counter[str] = Counter()
        for report in self.reports():
            running.update(report.holding)
        return [
            QueueStats(queue=queue, waiting=count, running=running[queue], delayed=late[queue], dead=dead[queue])
            for queue, count in waiting.items()
        ]

    # Ways and means

    def _taken(self, channel: Channel, queue: str, limit: int) -> list[Taken]:
        return drained(channel, queue, limit, self._driver.timeout) if self._count(channel, queue) else []

    def _count(self, channel: Channel, queue: str) -> int | None:
        """How many messages wait in a queue; None if there is no such queue. A wrong name must not end the channel."""
        probe = channel.link.channel(self._driver.timeout)
        try:
            frame = probe.rpc("queue_declare", queue=queue, passive=True, timeout=self._driver.timeout)
        except ChannelLost as error:
            if error.code == NOT_FOUND:
                return None
            raise
        probe.close()
        return int(frame.method.message_count)

    def _acknowledge(self, channel: Channel, tags: Sequence[int]) -> None:
        if not tags:
            return

        def work(future: Future[Any]) -> None:
            for tag in tags:
                channel.raw.basic_ack(tag)
            channel.raw.basic_qos(prefetch_count=0, callback=lambda _: settle(future, None))

        channel.ask(work, self._driver.timeout)

    @contextmanager
    def _looking(self, doing: str) -> Iterator[Channel]:
        """A channel, while nobody else looks."""
        with self._driver.visit(doing) as channel:
            deadline = time.monotonic() + self._driver.timeout
            pause = threading.Event()
            while not self._locked(channel):
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(f"RabbitMQ at {self._driver.place}: {doing}: somebody else has been looking"
                                            f" for {self._driver.timeout:g} s")
                pause.wait(0.02)
            yield channel

    def _locked(self, channel: Channel) -> bool:
        owner = channel.link.channel(self._driver.timeout)
        try:
            owner.rpc("queue_declare", queue=LOCK, exclusive=True, timeout=self._driver.timeout)
        except ChannelLost as error:
            if error.code == LOCKED:
                return False
            raise
        return True


def _age(letter: DeadLetter) -> tuple[object, int]:
    number = letter.id.rpartition(":")[2]
    return letter.died_at, int(number) if number.isdigit() else 0
