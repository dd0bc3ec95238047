"""Messages that a consumer publishes when a delivery is over: to wait, to go back, to the dead letters."""

from __future__ import annotations

from machinery_py.brokers.base import WAITING, Delivery, Disposal, Fate
from machinery_py.brokers.rabbitmq.messages import (
    COPY,
    ETA,
    FENCE,
    NAME,
    PARKS,
    QUEUE,
    STRIKES,
    UUID,
    Taken,
    dead_headers,
    due_in,
    own_headers,
    parcel_of,
)
from machinery_py.brokers.rabbitmq.publisher import Addressed
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.clock import micros
from machinery_py.connections.rabbitmq.client import AmqpDriver


class Returns:
    """Makes the parcels."""

    def __init__(self, driver: AmqpDriver, topology: Topology) -> None:
        self._driver = driver
        self._topology = topology

    def parks(self, one: Taken) -> int:
        return one.number(PARKS)

    def addressed(self, delivery: Delivery, one: Taken, disposal: Disposal) -> Addressed:
        headers = own_headers(one) | {FENCE: delivery.fence, STRIKES: delivery.strikes}
        headers.pop(COPY, None)
        headers.pop(ETA, None)
        exchange, key = "", delivery.queue
        uuid, name = one.uuid or one.text(UUID), one.name or one.text(NAME)
        delayed = dead = False
        if disposal.fate is Fate.LATER:
            headers[PARKS] = delivery.parks + (disposal.reason != WAITING)
            delay = due_in(disposal.eta, self._driver.clock.now())
            if disposal.eta is not None and delay:
                headers |= {QUEUE: delivery.queue, ETA: micros(disposal.eta)}
                exchange, key = self._topology.delay_route(delivery.queue, delay)
                delayed = True
        elif disposal.fate is Fate.DEAD:
            key, dead = self._topology.dead_queue(delivery.queue), True
            # The receipt as its id: a burial that is repeated after a lost reply is one letter.
            headers |= dead_headers(
                delivery.queue,
                disposal.reason,
                disposal.error,
                delivery.receipt,
                self._driver.now(),
            )
            uuid, name = disposal.uuid or uuid, disposal.name or name
        return Addressed(
            parcel_of(
                exchange,
                key,
                body=delivery.body,
                uuid=uuid,
                name=name,
                priority=delivery.priority,
                headers=headers,
            ),
            delivery.queue,
            delayed=delayed,
            dead=dead,
        )
