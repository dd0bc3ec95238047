"""The contracts over RabbitMQ. A consumer dies by its connection."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from machinery_py.brokers.base import Broker, Consumer, Delivery
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.consumer import AMQPConsumer
from machinery_py.brokers.rabbitmq.topics import AMQPSubscription
from machinery_py.brokers.topics import Subscription
from machinery_py.config.config import AMQPConfig
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker, seconds
from machinery_py.testing.conformance.leases import bodies, message, put
from machinery_py.testing.waiting import HANG, wait_until
from tests.stores.rabbitmq.case import (
    PACE,
    Brokers,
    PacedClock,
    amqp_config,
    clock,
    crash,
    open_brokers,
)

__all__ = ["amqp_config", "clock", "open_brokers"]


class TestAMQPBroker(BrokerConformance):
    @pytest.fixture
    def clock(self, amqp_url: str) -> PacedClock:
        return PacedClock(amqp_url)

    @pytest.fixture
    def amqp_config(self, request: pytest.FixtureRequest) -> AMQPConfig:
        """Queues have priorities where they are tested: 256 of them are slow."""
        return AMQPConfig(
            queue_declare_args={"x-max-priority": 255} if "priorit" in request.node.name else {}
        )

    @pytest.fixture
    def open_broker(self, open_brokers: Brokers) -> OpenBroker:
        return open_brokers

    def test_delayed_message_is_neither_early_nor_late(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        """By the server's time: on a slow machine more of it passes than the clock here says."""
        began = time.monotonic()
        broker.put([message(b"late", eta=seconds(clock.now(), 8.0))], token="")
        put(broker, b"now")
        assert bodies(consumer.receive(5, 0)) == [b"now"]
        came: list[Delivery] = []

        wait_until(lambda: came.extend(consumer.receive(5, 0)) or came, HANG, "the delayed message")

        assert bodies(came) == [b"late"]
        assert time.monotonic() - began >= 8.0 / PACE - 0.1

    def await_records(self, subscription: Subscription, count: int) -> None:
        assert isinstance(subscription, AMQPSubscription)
        wait_until(lambda: len(subscription._records) >= count, what="the records")

    def crash_consumer(
        self,
        broker: Broker,
        consumer: Consumer,
        clock: ManualClock,
        survivors: Sequence[Consumer] = (),
    ) -> None:
        assert isinstance(broker, AMQPBroker)
        assert isinstance(consumer, AMQPConsumer)
        crash(broker, consumer)
