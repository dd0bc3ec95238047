"""The broker contract over MemoryBroker."""

from __future__ import annotations

import pytest

from machinery_py.brokers.memory import MemoryBroker
from machinery_py.rows.memory import MemoryRows
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker


class TestMemoryBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, clock: ManualClock) -> OpenBroker:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: broker


def test_a_suspicion_ends_with_a_beat() -> None:
    clock = ManualClock()
    broker = MemoryBroker(MemoryRows(clock), lease=10.0)
    consumer = broker.consume(["q"], worker="w")
    clock.advance(11.0)
    broker.tend()
    consumer.beat()

    clock.advance(11.0)
    broker.tend()

    assert consumer.beat() is True
