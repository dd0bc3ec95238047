"""Messages in RabbitMQ, in Go Machinery's exchanges and queues (docs/explanation/amqp-protocol.md).

A consumer's deliveries come back when its connection ends: at once if its process dies, after two
heartbeats (10 s) if its host does. A live worker is never robbed of a long task.

Limits: a batch is not put whole: others see it grow. A token is known to the process that used
it; to others, and after a lost reply, two messages with one UUID are possible. Priorities need
`x-max-priority` in amqp.queue_declare_args, as with Go; without it they are carried along and
change nothing. Go's own delay queues are not listed.

Dead letters: topology.py has their queue, publisher.py writes one, messages.py reads it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import close_all
from machinery_py.brokers.putting import PutsAhead, Putting
from machinery_py.brokers.rabbitmq.consumer import AMQPConsumer
from machinery_py.brokers.rabbitmq.control import Report, ask, order_pause
from machinery_py.brokers.rabbitmq.inspect import DelayedSplit, Inspection, inspecting
from machinery_py.brokers.rabbitmq.messages import (
    QUEUE,
    Publication,
    headers_of,
    message_of,
)
from machinery_py.brokers.rabbitmq.publisher import (
    MessagePublisher,
    PublishAttempt,
    PublishAttempts,
    Sending,
)
from machinery_py.brokers.rabbitmq.topics import AMQPSubscription, TopicSender
from machinery_py.brokers.rabbitmq.topology import Topology, digest
from machinery_py.connections.durability import Concern
from machinery_py.connections.rabbitmq.client import NOT_FOUND, AmqpDriver
from machinery_py.connections.rabbitmq.io_thread import ChannelLost

# Seconds; RabbitMQ 3.10 notes its quorum queues twice a second, and loses for good a newer one.
SETTLED = 1.5
TEND_EVERY = 1.0  # seconds; RabbitMQ looks after delayed messages and dead consumers by itself


class AMQPPutting(Putting):
    """Messages of a submission on their way.

    Attributes:
        is_new: some of them had not been stored by an earlier try.
    """

    def __init__(
        self,
        publisher: MessagePublisher,
        publications: Sequence[Publication],
        attempt: PublishAttempt,
    ) -> None:
        self._publisher = publisher
        self._attempt = attempt
        self._sending: Sending | None = None
        attempt.lock.acquire()
        try:
            self.is_new: bool = bool(attempt.left) or not publications
            if attempt.left:
                self._sending = publisher.begin(publications, attempt)
        except BaseException:
            attempt.lock.release()
            raise

    def wait(self) -> None:
        if self._sending is not None:
            self._publisher.wait(self._sending)

    def close(self) -> None:
        if self._sending is not None:
            self._sending.end()
        self._attempt.lock.release()


class AMQPBroker(Broker, PutsAhead):
    """Queues on the driver's server. The driver belongs to whoever made it."""

    features: BrokerFeatures = BrokerFeatures(
        name="amqp",
        deduplicates=False,
        whole_batches=False,
        keeps_turns=False,
        counts_returns=False,
        tells_age=False,
        topics=True,
    )

    def __init__(
        self, driver: AmqpDriver, topology: Topology, *, consumer_timeout: float = 1800.0
    ) -> None:
        """`consumer_timeout`: seconds that the server lets a delivery be unacknowledged."""
        self.driver = driver
        self.topology = topology
        self._consumer_timeout = consumer_timeout
        self._publisher = MessagePublisher(driver, topology)
        self._attempts = PublishAttempts()
        self._topics = TopicSender(driver)
        self._split = DelayedSplit()
        self._consumers: weakref.WeakSet[AMQPConsumer] = weakref.WeakSet()

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        with self.begin_put(messages, token=token) as putting:
            putting.wait()
            return putting.is_new

    def begin_put(self, messages: Sequence[Message], *, token: str) -> AMQPPutting:
        attempt = self._attempts.of(token, len(messages), self.driver.clock.monotonic())
        publications = [self._publication(message) for message in messages]
        return AMQPPutting(self._publisher, publications, attempt)

    def was_put(self, token: str) -> bool:
        return self._attempts.stored(token)

    def waiting(self, queue: str) -> int:
        return self._publisher.waiting(self.topology.queue_of(queue))

    def _publication(self, message: Message) -> Publication:
        return self._publisher.to_queue(
            message,
            self.topology.queue_of(message.queue),
            headers_of(message, self.driver.clock.now()),
            eta=message.eta,
            exchange=self.topology.config.exchange,
        )

    def consume(self, queues: Sequence[str], *, worker: str) -> AMQPConsumer:
        self._publisher.register(self.topology.queue_of(queue) for queue in queues)
        consumer = AMQPConsumer(
            self.driver,
            self._publisher,
            self.topology,
            queues,
            worker=worker,
            consumer_timeout=self._consumer_timeout,
        )
        self._consumers.add(consumer)
        return consumer

    def declare(self, queues: Sequence[str]) -> Sequence[str]:
        names = list(dict.fromkeys(map(self.topology.queue_of, queues)))
        self._publisher.declare(names)
        if self.topology.is_quorum:
            time.sleep(SETTLED)
        return self.topology.described(names)

    def tend(self) -> float:
        return TEND_EVERY

    # Inspection

    def _inspecting(self, doing: str) -> contextlib.AbstractContextManager[Inspection]:
        return inspecting(self.driver, self.topology, doing)

    def pending(self, queue: str, limit: int) -> list[Message]:
        queue = self.topology.queue_of(queue)
        with self._inspecting(f"listing {queue!r}") as inspection:
            return [message_of(one) for one in inspection.take(queue, limit)]

    def delayed(self, limit: int) -> list[Message]:
        with self._inspecting("listing delayed messages") as inspection:
            found = [message_of(one, queue=one.text(QUEUE)) for one in inspection.delayed()]
        found.sort(key=lambda message: message.eta or self.driver.clock.now())
        return found[:limit]

    def stats(self) -> list[QueueStats]:
        with self._inspecting("counting messages") as inspection:
            queues, delayed_queues = inspection.queues()
            waiting = {queue: inspection.count(queue) or 0 for queue in queues}
            delayed = inspection.count_delayed(delayed_queues, self._split)
            letters = {queue: self.topology.dead_queue(queue) for queue in queues}
            dead = {queue: inspection.count(name) or 0 for queue, name in letters.items()}
        # Last: a message on its way to a worker is rather counted twice than not at all.
        running: Counter[str] = Counter()
        for report in self._reports():
            running.update(report.holding)
        paused = self._publisher.paused(queues)
        return [
            QueueStats(
                queue=queue,
                waiting=waiting[queue],
                running=running[queue],
                delayed=delayed[queue],
                dead=dead[queue],
                paused=queue in paused,
            )
            for queue in queues
        ]

    def workers(self) -> list[WorkerInfo]:
        return [report.info for report in self._reports()]

    def _reports(self) -> Sequence[Report]:
        with self.driver.visit("listing workers") as channel:
            try:
                return ask(channel, self.topology.workers, self.driver.timeout)
            except ChannelLost as error:
                if error.code == NOT_FOUND:
                    return []  # nothing was ever declared
                raise

    def purge(self, queue: str) -> int:
        queue = self.topology.queue_of(queue)
        with self._inspecting(f"purging {queue!r}") as inspection:
            return inspection.purge(queue)

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        queue = self.topology.queue_of(queue)
        with self._inspecting(f"purging {queue!r}") as inspection:
            yield from inspection.purge_each(queue, before)

    def _queues(self) -> list[str]:
        with self._inspecting("listing queues") as inspection:
            return inspection.queues()[0]

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        queues = [self.topology.queue_of(queue)] if queue else self._queues()
        with self._inspecting("listing dead letters") as inspection:
            letters = {letter.id: letter for _, letter in inspection.letters(queues)}
        return sorted(letters.values(), key=_age, reverse=True)[:limit]

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        queues, wanted = self._queues(), set(ids)
        with self._inspecting("taking dead letters") as inspection:
            found = [pair for pair in inspection.letters(queues) if pair[1].id in wanted]
            inspection.delete([one for one, _ in found])
        letters = {letter.id: letter for _, letter in found}
        return [letters[id] for id in dict.fromkeys(ids) if id in letters]

    # Pausing

    def pause(self, queue: str) -> None:
        name = self.topology.queue_of(queue)
        self._publisher.register([name])  # it is listed, though there may be no such queue yet
        order_pause(self.driver, self.topology, name, shut=True)

    def resume(self, queue: str) -> None:
        order_pause(self.driver, self.topology, self.topology.queue_of(queue), shut=False)

    def paused(self) -> frozenset[str]:
        return self._publisher.paused(self._queues())

    # Others

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        name = self.topology.queue_of(queue)
        letter = self._publisher.to_dead_letters(
            message,
            name,
            headers_of(message, self.driver.clock.now()),
            reason=reason,
            error=error,
            letter=f"{message.uuid}:{digest(message.body.hex())}",  # a repeat is one letter
        )
        self._publisher.send([letter])

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        self._topics.append_records(topic, records, ttl)

    def subscribe(self, topic: str, *, since: float = 0.0) -> AMQPSubscription:
        del since  # BrokerFeatures.keeps_topics
        return AMQPSubscription(self.driver, topic)

    def concerns(self) -> list[Concern]:
        if not self.topology.limits_length or (self.topology.is_quorum and self.topology.rejects):
            return []
        return [
            Concern(
                "queue_declare_args limit the length of queues: RabbitMQ drops what comes due "
                "while a classic queue is full, and the oldest tasks where x-overflow is not "
                "reject-publish (take quorum queues with reject-publish)"
            )
        ]

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)


def _age(letter: DeadLetter) -> tuple[object, int]:
    number = letter.id.rpartition(":")[2]
    return letter.died_at, int(number) if number.isdigit() else 0
