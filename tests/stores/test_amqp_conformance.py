"""The contracts over RabbitMQ. A consumer dies by its connection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py._drivers.memory import MemoryHub
from machinery_py.brokers.amqp import AMQPBroker
from machinery_py.brokers.amqp_consumer import AMQPConsumer
from machinery_py.brokers.base import Broker, Consumer
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from tests.servers import rabbitmq_server
from tests.stores.amqp_case import Brokers, PacedClock, amqp_url, clock, crash, open_brokers, vhosts

__all__ = ["amqp_url", "clock", "open_brokers", "rabbitmq_server", "vhosts"]


class TestAMQPBroker(BrokerConformance):
    @pytest.fixture
    def clock(self) -> PacedClock:
        return PacedClock()

    @pytest.fixture
    def open_broker(self, open_brokers: Brokers) -> OpenBroker:
        return open_brokers

    def crash_consumer(
        self, broker: Broker, consumer: Consumer, clock: ManualClock, survivors: Sequence[Consumer] = ()
    ) -> None:
        assert isinstance(broker, AMQPBroker)
        assert isinstance(consumer, AMQPConsumer)
        crash(broker, consumer)
