"""The contracts with RabbitMQ for a result backend: alone, and beside brokers of two kinds."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Session, Store
from machinery_py.stores.outbox import TwoSession, TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.backends.rabbitmq.case import Backends, LapsingClock, open_backends, results_url
from tests.stores.rabbitmq.case import Brokers, PacedClock, amqp_config, crash, open_brokers

__all__ = ["amqp_config", "open_backends", "open_brokers", "results_url"]


class TestAMQPBackend(BackendConformance):
    MANY = 10_000 if os.environ.get("MACHINERY_TEST_FULL") else 500  # each has a queue of its own

    @pytest.fixture
    def clock(self, results_url: str) -> LapsingClock:
        return LapsingClock(results_url)

    @pytest.fixture
    def open_backend(self, open_backends: Backends) -> OpenBackend:
        return open_backends


class BesideMemory:
    @pytest.fixture
    def open_store(self, open_backends: Backends, clock: ManualClock) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, open_backends(), clock)


class TestMemoryBrokerAndAMQPBackend(BesideMemory, SettlementConformance):
    pass


class TestSchedulesInRabbitMQ(BesideMemory, ScheduleConformance):
    pass


class TestClaimsInRabbitMQ(BesideMemory, ClaimConformance):
    pass


class TestAMQPBrokerAndAMQPBackend(SettlementConformance):
    @pytest.fixture
    def clock(self, amqp_url: str) -> PacedClock:
        return PacedClock(amqp_url)

    @pytest.fixture
    def open_store(
        self, open_brokers: Brokers, open_backends: Backends, clock: ManualClock
    ) -> OpenStore:
        return lambda: TwoStores(open_brokers(), open_backends(), clock)

    def crash_session(
        self, store: Store, session: Session, clock: ManualClock, survivors: Sequence[Session] = ()
    ) -> None:
        assert isinstance(store.broker, AMQPBroker)
        assert isinstance(session, TwoSession)
        crash(store.broker, session.consumer)  # type: ignore[arg-type]  # it is this broker's
