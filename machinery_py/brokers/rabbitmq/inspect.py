"""Looking into RabbitMQ queues with plain AMQP: take all, read, and put back; of dead letters, some are taken for good.

Each look has a connection of its own. What it took goes back to its place when the connection ends, however it ends. While it
looks, the messages are in its hands: a worker that asks in that moment gets them some milliseconds later. One process looks
at a time: an exclusive queue is the lock, and goes with the connection of its owner.

Counting takes nothing. But the levels are shared by all queues: whose the delayed messages are is known if they were sent to one
queue alone, else some are read: at most SAMPLE of each level, and again when the counts have changed, or after SPLIT_LIFE.

Limits: a waiting message that was looked at counts as delivered once before (`redelivered`). RabbitMQ has no other way. With more
than SAMPLE messages in a level and several queues, the delayed of each are an estimate, whose sum is right.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from machinery_py.brokers.base import DeadLetter, Message, QueueStats
from machinery_py.brokers.rabbitmq.control import Report, ask
from machinery_py.brokers.rabbitmq.fetch import drained
from machinery_py.brokers.rabbitmq.gets import Getter, gotten
from machinery_py.brokers.rabbitmq.messages import LATE, QUEUE, Taken, letter_of, message_of
from machinery_py.brokers.rabbitmq.topology import LEVELS, Topology
from machinery_py.connections.rabbitmq.client import LOCKED, NOT_FOUND, AmqpDriver
from machinery_py.connections.rabbitmq.io_thread import Channel, ChannelLost, settle
from machinery_py.connections.rabbitmq.queues import LOOKING
from machinery_py.errors import BrokerUnavailable

ALL = 1_000_000  # messages; as many as are there
SAMPLE = 200  # messages
SPLIT_LIFE = 10.0  # seconds


class Looking:
    """The questions to a server. May be used from any thread."""

    def __init__(self, driver: AmqpDriver, topology: Topology) -> None:
        self._driver = driver
        self._topology = topology
        self._split: tuple[Sequence[int], float, Counter[str]] | None = (
            None  # counts, until when, delayed by queue
        )

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
            found = [
                (one, letter)
                for one, letter in self._letters(channel, queues)
                if letter.id in wanted
            ]
            self._acknowledge(channel, [one.tag for one, _ in found])
        letters = {letter.id: letter for _, letter in found}
        return [letters[id] for id in dict.fromkeys(ids) if id in letters]

    def _letters(
        self, channel: Channel, queues: Sequence[str]
    ) -> Iterator[tuple[Taken, DeadLetter]]:
        for queue in queues:
            for one in self._taken(channel, self._topology.dead_queue(queue), ALL):
                yield one, letter_of(one)

    # Queues and workers

    def queues(self) -> list[str]:
        """Every queue that was ever used. Names that are noted twice are thinned out."""
        with self._looking("listing queues") as channel:
            return self._queues(channel)[0]

    def _queues(self, channel: Channel) -> tuple[list[str], list[str]]:
        """All queues, and those to which delayed messages were sent."""
        seen: set[tuple[str, bool]] = set()
        spare: list[int] = []
        for one in self._taken(channel, self._topology.registry, ALL):
            note = one.body.decode(errors="replace"), bool(one.headers.get(LATE))
            if note in seen:
                spare.append(one.tag)
            seen.add(note)
        self._acknowledge(channel, spare)
        return sorted({name for name, _ in seen}), sorted(name for name, late in seen if late)

    def reports(self) -> Sequence[Report]:
        with self._driver.visit("listing workers") as channel:
            try:
                return ask(channel, self._topology.workers, self._driver.timeout)
            except ChannelLost as error:
                if error.code == NOT_FOUND:
                    return []  # nothing was ever declared
                raise

    def stats(self) -> list[QueueStats]:
        with self._looking("counting messages") as channel:
            queues, late_queues = self._queues(channel)
            waiting = {queue: self._count(channel, queue) or 0 for queue in queues}
            late = self._late_of(channel, late_queues)
            dead = {
                queue: self._count(channel, self._topology.dead_queue(queue)) or 0
                for queue in waiting
            }
        # Last: what is on its way from the queue to a worker is rather counted twice than not at all.
        running: Counter[str] = Counter()
        for report in self.reports():
            running.update(report.holding)
        return [
            QueueStats(
                queue=queue,
                waiting=count,
                running=running[queue],
                delayed=late[queue],
                dead=dead[queue],
            )
            for queue, count in waiting.items()
        ]

    def _late_of(self, channel: Channel, queues: Sequence[str]) -> Counter[str]:
        """How many messages are delayed for each of the queues to which any ever were."""
        levels = [self._topology.level_name(level) for level in range(LEVELS)]
        counts = self._counts(channel, levels)
        if not any(counts):
            return Counter()
        if len(queues) == 1:
            return Counter({queues[0]: sum(counts)})
        known = self._split
        if known is None or known[0] != counts or known[1] < time.monotonic():
            known = self._split = (
                counts,
                time.monotonic() + SPLIT_LIFE,
                self._read_split(channel, levels, counts),
            )
        return known[2]

    def _read_split(
        self, channel: Channel, levels: Sequence[str], counts: Sequence[int]
    ) -> Counter[str]:
        shares: dict[str, float] = {}
        for level, count in zip(levels, counts, strict=True):
            some = self._drained(channel, level, min(count, SAMPLE))
            for one in some:
                queue = one.text(QUEUE)
                shares[queue] = shares.get(queue, 0.0) + count / len(some)
        return Counter({queue: round(share) for queue, share in shares.items()})

    # Ways and means

    def _counts(self, channel: Channel, queues: Sequence[str]) -> list[int]:
        """How many messages wait in each, asked in one go; nothing if one is not there."""
        probe = channel.link.channel(self._driver.timeout)
        found: list[int] = []

        def counted(future: Future[Any], frame: Any) -> None:
            found.append(frame.method.message_count)
            if len(found) == len(queues):
                settle(future, None)

        def begin(future: Future[Any]) -> None:
            for queue in queues:
                probe.raw.queue_declare(
                    queue, passive=True, callback=functools.partial(counted, future)
                )

        try:
            probe.ask(begin, self._driver.timeout)
        except ChannelLost as error:
            if error.code == NOT_FOUND:
                return []
            raise
        probe.close()
        return found

    def _taken(self, channel: Channel, queue: str, limit: int) -> list[Taken]:
        return self._drained(channel, queue, limit) if self._count(channel, queue) else []

    def _drained(self, channel: Channel, queue: str, limit: int) -> list[Taken]:
        if self._topology.is_quorum:
            return gotten(Getter(channel), queue, limit, self._driver.timeout) if limit else []
        return drained(channel, queue, limit, self._driver.timeout)

    def _count(self, channel: Channel, queue: str) -> int | None:
        """How many messages wait in a queue; None if there is no such queue. A wrong name must not end the channel."""
        probe = channel.link.channel(self._driver.timeout)
        try:
            frame = probe.rpc(
                "queue_declare", queue=queue, passive=True, timeout=self._driver.timeout
            )
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
                    raise BrokerUnavailable(
                        f"RabbitMQ at {self._driver.place}: {doing}: somebody else has been looking"
                        f" for {self._driver.timeout:g} s"
                    )
                pause.wait(0.02)
            yield channel

    def _locked(self, channel: Channel) -> bool:
        owner = channel.link.channel(self._driver.timeout)
        try:
            owner.rpc("queue_declare", queue=LOOKING, exclusive=True, timeout=self._driver.timeout)
        except ChannelLost as error:
            if error.code == LOCKED:
                return False
            raise
        return True


def _age(letter: DeadLetter) -> tuple[object, int]:
    number = letter.id.rpartition(":")[2]
    return letter.died_at, int(number) if number.isdigit() else 0
