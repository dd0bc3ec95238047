"""The contracts over RabbitMQ. A consumer dies by its connection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from machinery_py.brokers.amqp import AMQPBroker
from machinery_py.brokers.amqp_consumer import AMQPConsumer
from machinery_py.brokers.base import Broker, Consumer
from machinery_py.config import AMQPConfig
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from tests.servers import rabbitmq_server
from tests.stores.amqp_case import Brokers, PacedClock, amqp_config, amqp_url, clock, crash, open_brokers, vhosts

__all__ = ["amqp_config", "amqp_url", "clock", "open_brokers", "rabbitmq_server", "vhosts"]


class TestAMQPBroker(BrokerConformance):
    @pytest.fixture
    def clock(self, amqp_url: str) -> PacedClock:
        return PacedClock(amqp_url)

    @pytest.fixture
    def amqp_config(self, request: pytest.FixtureRequest) -> AMQPConfig:
        """Queues have priorities where they are tested: 256 of them are slow."""
        return AMQPConfig(queue_declare_args={"x-max-priority": 255} if "priorit" in request.node.name else {})

    @pytest.fixture
    def open_broker(self, open_brokers: Brokers) -> OpenBroker:
        return open_brokers

    def crash_consumer(
        self, broker: Broker, consumer: Consumer, clock: ManualClock, survivors: Sequence[Consumer] = ()
    ) -> None:
        assert isinstance(broker, AMQPBroker)
        assert isinstance(consumer, AMQPConsumer)
        crash(broker, consumer)
