"""Where a consumer keeps what it must hold in another way than unacknowledged on the queue it came from.

A delivery is moved into our holding queue for two reasons:

- RabbitMQ ends a channel on which a delivery is unacknowledged for longer than its `consumer_timeout`, 30 minutes unless it
  is configured. What runs longer is moved before that, and again as often as it takes.
- A suspect (it came back before) is about to run: the copy says one strike more. What has not begun gets none.

The holding queue has one subscriber, us; what is in it is unacknowledged on our channel, so its time to live does not run.
When we die the server puts it back, its time is over at once, and dead-lettering brings it to the queue it came from.

    1  copy published to the holding queue, confirmed       crash: the copy and the original come back, with one UUID
    2  copy delivered to us                                 crash: the same
    3  original acknowledged                                crash: the copy comes back, with its strike

Limits: with classic queues the dead-lettering of step 3 is not safe against a crash of the RabbitMQ node in that very moment.
With quorum queues the holding queue is one as well, and hands a copy on only when its queue has it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from machinery_py.brokers.base import Delivery
from machinery_py.brokers.rabbitmq.messages import (
    COPY,
    FENCE,
    STRIKES,
    Taken,
    own_headers,
    parcel_of,
)
from machinery_py.brokers.rabbitmq.publisher import Addressed, Sending
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.connections.rabbitmq.client import AmqpDriver, translated
from machinery_py.connections.rabbitmq.io_thread import AmqpConnection, Channel, settle

STAY = 1_000  # ms; what nobody holds leaves a holding queue after this
GONE = 600_000  # ms; a holding queue without a subscriber is removed after this


class HeldDelivery(msgspec.Struct, gc=False, eq=False):
    """A delivery and where it is unacknowledged. `birth` is of the life that it was delivered on."""

    delivery: Delivery
    one: Taken
    channel: Channel
    tag: int
    since: float
    birth: object
    moved: bool = False
    begun: bool = False
    subscription: str = ""  # to be ended before it is settled


class Holding:
    """The holding queues of one life, one for each queue of origin; made when they are needed."""

    def __init__(
        self,
        link: AmqpConnection,
        sending: Sending,
        driver: AmqpDriver,
        topology: Topology,
        name: str,
    ) -> None:
        self._link = link
        self._sending = sending
        self._driver = driver
        self._topology = topology
        self._name = name
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._names: dict[str, str] = {}
        self._copies = itertools.count(1)
        self._arrivals: dict[int, Future[int]] = {}

    def copy(self, held: Sequence[HeldDelivery]) -> tuple[Channel, list[int]]:
        """Steps 1 and 2: the channel, and the delivery tag of each copy.

        Raises:
            MachineryError: some copies may be there. They come back like the message of a consumer that died.
        """
        timeout = self._driver.timeout
        with translated(self._driver.place, "holding a delivery"):
            with self._lock:
                channel = self._ready({one.delivery.queue for one in held})
            numbers = [next(self._copies) for _ in held]
            arrivals = {number: Future[int]() for number in numbers}
            self._arrivals |= arrivals
            try:
                self._sending.send(
                    [
                        self._addressed(one, number)
                        for one, number in zip(held, numbers, strict=True)
                    ]
                )
                return channel, [
                    channel.ask(_await(arrivals[number]), timeout) for number in numbers
                ]
            finally:
                for number in numbers:
                    self._arrivals.pop(number, None)

    def _addressed(self, held: HeldDelivery, number: int) -> Addressed:
        delivery = held.delivery
        headers = own_headers(held.one) | {
            COPY: number,
            FENCE: delivery.fence,
            STRIKES: delivery.strikes + held.begun,
        }
        return Addressed(
            parcel_of(
                "",
                self._names[delivery.queue],
                body=delivery.body,
                uuid=held.one.uuid,
                name=held.one.name,
                priority=delivery.priority,
                headers=headers,
            )
        )

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
            channel.ask(self._subscriber(channel, name), timeout)
            self._names[queue] = name
        return channel

    def _subscriber(self, channel: Channel, name: str) -> Callable[[Future[Any]], None]:
        def arrived(_: object, method: Any, properties: Any, body: bytes) -> None:
            waiting = self._arrivals.get((properties.headers or {}).get(COPY, 0))
            if waiting is not None:
                settle(waiting, method.delivery_tag)

        def subscribe(future: Future[Any]) -> None:
            channel.raw.basic_qos(prefetch_count=0, callback=lambda _: None)
            channel.raw.basic_consume(name, arrived, callback=lambda _: settle(future, None))

        return subscribe


def _await(arrival: Future[int]) -> Callable[[Future[Any]], None]:
    def work(future: Future[Any]) -> None:
        arrival.add_done_callback(lambda done: settle(future, done.result()))

    return work
