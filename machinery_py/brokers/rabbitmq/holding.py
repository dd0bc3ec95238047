"""Holding of deliveries: on the channel that they came on, or in a holding queue of ours.

A delivery is moved into a holding queue for two reasons:

- RabbitMQ ends a channel on which a delivery is unacknowledged for longer than its
  `consumer_timeout`, 30 minutes unless it is configured. A longer run is moved before that, and
  again as often as it takes.
- A suspect (it came back before) is about to run: the copy says one strike more. A delivery whose
  task has not begun gets none.

The holding queue has one subscriber, us; its messages are unacknowledged on our channel, so their
time to live does not run. When we die the server puts them back, their time is over at once, and
dead-lettering brings them to the queue that they came from.

    step                                                crash after it
    1  copy published to the holding queue, confirmed   copy and original come back, with one UUID
    2  copy delivered to us                             the same
    3  original acknowledged                            the copy comes back, with its strike

Limits: with classic queues the dead-lettering of step 3 is not safe against a crash of the RabbitMQ
node in that very moment. With quorum queues the holding queue is one as well, and hands a copy on
only when its queue has it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from machinery_py.brokers.base import Delivery
from machinery_py.brokers.rabbitmq.fetch import Getter
from machinery_py.brokers.rabbitmq.messages import (
    COPY,
    COUNT,
    STRIKES,
    Publication,
    ReceivedMessage,
    addressed,
)
from machinery_py.brokers.rabbitmq.publisher import MessagePublisher
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.connections.rabbitmq.client import AmqpDriver, translated
from machinery_py.connections.rabbitmq.io_thread import AmqpConnection, Channel, resolve

STAY = 1_000  # ms; a message that nobody holds leaves a holding queue after this
GONE = 600_000  # ms; a holding queue without a subscriber is removed after this


class ConsumerConnection:
    """A connection and its channels. What was delivered on it ends with it."""

    link: AmqpConnection
    main: Channel
    holding: HoldingQueues
    getter: Getter | None = None  # with quorum queues
    lost = False  # its deliveries are given up

    @property
    def is_open(self) -> bool:
        return self.main.is_open

    def close_main(self) -> None:
        """Close the main channel, which ends all deliveries; in the I/O thread."""
        if self.main.raw.is_open:
            self.main.raw.close()


class HeldDelivery(msgspec.Struct, gc=False, eq=False):
    """A delivery, the connection that it came on, and where it is unacknowledged."""

    delivery: Delivery
    message: ReceivedMessage
    channel: Channel
    tag: int
    since: float
    connection: ConsumerConnection
    moved: bool = False
    begun: bool = False


class HoldingQueues:
    """The holding queues of one connection, one for each queue of origin, declared when needed."""

    def __init__(
        self,
        link: AmqpConnection,
        publisher: MessagePublisher,
        driver: AmqpDriver,
        topology: Topology,
        name: str,
    ) -> None:
        self._link = link
        self._publisher = publisher
        self._driver = driver
        self._topology = topology
        self._name = name
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._names: dict[str, str] = {}
        self._copies = itertools.count(1)
        self._arrivals: dict[int, Future[int]] = {}

    def copy(self, held: Sequence[HeldDelivery]) -> tuple[Channel, list[int]]:
        """Do steps 1 and 2; return the channel, and the delivery tag of each copy.

        Raises:
            MachineryError: some copies may be there. They come back like those of a dead consumer.
        """
        numbers = [next(self._copies) for _ in held]
        with translated(self._driver.place, "holding a delivery"):
            with self._lock:
                channel = self._ready({one.delivery.queue for one in held})
            arrivals = {number: Future[int]() for number in numbers}
            self._arrivals |= arrivals
            try:
                self._publisher.send(
                    [self._copy_of(one, number) for one, number in zip(held, numbers, strict=True)]
                )
                tags = [
                    channel.ask(_passing(arrivals[number]), self._driver.timeout)
                    for number in numbers
                ]
            finally:
                for number in numbers:
                    self._arrivals.pop(number, None)
        return channel, tags

    def _copy_of(self, held: HeldDelivery, number: int) -> Publication:
        delivery = held.delivery
        headers = held.message.own_headers() | {
            COPY: number,
            COUNT: delivery.count,
            STRIKES: delivery.strikes + held.begun,
        }
        return Publication(addressed("", self._names[delivery.queue], held.message, headers))

    def _ready(self, queues: set[str]) -> Channel:
        timeout = self._driver.timeout
        if self._channel is None:
            self._channel = self._link.channel(timeout)
        channel = self._channel
        for queue in queues - self._names.keys():
            name = f"machinery.held.{self._name}.{len(self._names)}"
            arguments = self._topology.held(queue, stay=STAY, gone=GONE)
            channel.rpc(
                "queue_declare", queue=name, durable=True, arguments=arguments, timeout=timeout
            )
            channel.rpc("basic_qos", prefetch_count=0, timeout=timeout)
            channel.rpc(
                "basic_consume", queue=name, on_message_callback=self._arrived, timeout=timeout
            )
            self._names[queue] = name
        return channel

    def _arrived(self, _: object, method: Any, properties: Any, __: bytes) -> None:
        waiting = self._arrivals.get((properties.headers or {}).get(COPY, 0))
        if waiting is not None:
            resolve(waiting, method.delivery_tag)


def _passing(arrival: Future[int]) -> Callable[[Future[Any]], None]:
    """Return work for Channel.ask that ends with `arrival`."""
    return lambda future: arrival.add_done_callback(lambda done: resolve(future, done.result()))
