"""Messages in RabbitMQ, in Go Machinery's exchanges and queues; what they are stands in docs/explanation/amqp-protocol.md.

A consumer's deliveries come back when its connection ends: at once if its process dies, after two heartbeats (10 s) if its
host does. A live worker is never robbed of a long task.

Limits: a batch is not put whole: others see it grow. A token is known to the process that used it; to others, and for what a
lost reply concealed, two messages with one UUID are possible. Priorities need `x-max-priority` in amqp.queue_declare_args, as
with Go; without it they are carried along and change nothing. Go's own delay queues are not listed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import msgspec

from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
    close_all,
)
from machinery_py.brokers.rabbitmq.consumer import AMQPConsumer
from machinery_py.brokers.rabbitmq.inspect import Looking
from machinery_py.brokers.rabbitmq.messages import (
    ETA,
    QUEUE,
    dead_headers,
    due_in,
    headers_of,
    parcel_of,
)
from machinery_py.brokers.rabbitmq.pauses import spread
from machinery_py.brokers.rabbitmq.publisher import Addressed, Attempts, Sending
from machinery_py.brokers.rabbitmq.topology import Topology, digest
from machinery_py.clock import micros
from machinery_py.connections.durability import Concern
from machinery_py.connections.rabbitmq.client import AmqpDriver

SETTLED = 1.5  # seconds; RabbitMQ 3.10 notes twice a second which quorum queues it has, and loses what it had not noted for good
TEND_EVERY = 1.0  # seconds; RabbitMQ looks after delayed messages and dead consumers by itself


class AMQPBroker(Broker):
    """Queues on the driver's server. The driver belongs to whoever made it."""

    features = BrokerFeatures(
        name="amqp",
        deduplicates=False,
        whole_batches=False,
        counts_returns=False,
        tells_age=False,
    )

    def __init__(
        self, driver: AmqpDriver, topology: Topology, *, consumer_timeout: float = 1800.0
    ) -> None:
        """`consumer_timeout`: seconds that the server lets a delivery be unacknowledged."""
        self.driver = driver
        self.topology = topology
        self._consumer_timeout = consumer_timeout
        self._sending = Sending(driver, topology)
        self._attempts = Attempts()
        self._looking = Looking(driver, topology)
        self._consumers: weakref.WeakSet[AMQPConsumer] = weakref.WeakSet()

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        attempt = self._attempts.of(token, len(messages), self.driver.clock.monotonic())
        with attempt.lock:
            if not attempt.left:
                return not messages
            self._sending.send([self._addressed(message) for message in messages], attempt)
            return True

    def _addressed(self, message: Message) -> Addressed:
        now = self.driver.clock.now()
        queue = self.topology.queue_of(message.queue)
        headers = headers_of(message, micros(now))
        exchange, key = self.topology.config.exchange, queue
        delay = due_in(message.eta, now)
        if message.eta is not None and delay:
            headers |= {QUEUE: queue, ETA: micros(message.eta)}
            exchange, key = self.topology.delay_route(queue, delay)
        return Addressed(
            parcel_of(
                exchange,
                key,
                body=message.body,
                uuid=message.uuid,
                name=message.name,
                priority=message.priority,
                headers=headers,
            ),
            queue,
            delayed=bool(delay),
        )

    def consume(self, queues: Sequence[str], *, worker: str) -> AMQPConsumer:
        self._sending.note(self.topology.queue_of(queue) for queue in queues)
        consumer = AMQPConsumer(
            self.driver,
            self._sending,
            self.topology,
            queues,
            worker=worker,
            consumer_timeout=self._consumer_timeout,
        )
        self._consumers.add(consumer)
        return consumer

    def declare(self, queues: Sequence[str]) -> Sequence[str]:
        names = list(dict.fromkeys(map(self.topology.queue_of, queues)))
        self._sending.declare(names)
        if self.topology.is_quorum:
            time.sleep(SETTLED)
        return self.topology.described(names)

    def tend(self) -> float:
        return TEND_EVERY

    def pending(self, queue: str, limit: int) -> list[Message]:
        return self._looking.pending(self.topology.queue_of(queue), limit)

    def delayed(self, limit: int) -> list[Message]:
        return self._looking.delayed(limit)

    def stats(self) -> list[QueueStats]:
        lines = self._looking.stats()
        paused = self._sending.paused([line.queue for line in lines])
        return [msgspec.structs.replace(line, paused=line.queue in paused) for line in lines]

    def workers(self) -> list[WorkerInfo]:
        return [report.info for report in self._looking.reports()]

    def purge(self, queue: str) -> int:
        return self._looking.purge(self.topology.queue_of(queue))

    def pause(self, queue: str) -> None:
        name = self.topology.queue_of(queue)
        self._sending.note([name])  # so that it is listed, though there may be no such queue yet
        spread(self.driver, self.topology, name, shut=True)

    def resume(self, queue: str) -> None:
        spread(self.driver, self.topology, self.topology.queue_of(queue), shut=False)

    def paused(self) -> frozenset[str]:
        return self._sending.paused(self._looking.queues())

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        return self._looking.dead_letters(
            [self.topology.queue_of(queue)] if queue else self._looking.queues(), limit
        )

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        name = self.topology.queue_of(queue)
        # Its id: a burial that is repeated is one letter.
        letter = f"{message.uuid}:{digest(message.body.hex())}"
        headers = headers_of(message, self.driver.now()) | dead_headers(
            name, reason, error, letter, self.driver.now()
        )
        parcel = parcel_of(
            "",
            self.topology.dead_queue(name),
            body=message.body,
            uuid=message.uuid,
            name=message.name,
            priority=message.priority,
            headers=headers,
        )
        self._sending.send([Addressed(parcel, name, dead=True)])

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        return self._looking.take_dead(self._looking.queues(), ids)

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
