"""The settlement contract with the messages in RabbitMQ and the states elsewhere."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.connections.memory import MemoryHub
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.stores.base import Session, Store
from machinery_py.stores.outbox import TwoSession, TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.stores.rabbitmq.case import (
    Brokers,
    PacedClock,
    amqp_config,
    amqp_url,
    clock,
    crash,
    open_brokers,
    vhosts,
)
from tests.support.fixtures import rabbitmq_server

__all__ = ["amqp_config", "amqp_url", "clock", "open_brokers", "rabbitmq_server", "vhosts"]


class AMQPSettlement(SettlementConformance):
    """A session dies with its connection."""

    @pytest.fixture
    def clock(self, amqp_url: str) -> PacedClock:
        return PacedClock(amqp_url)

    def crash_session(
        self, store: Store, session: Session, clock: ManualClock, survivors: Sequence[Session] = ()
    ) -> None:
        assert isinstance(store.broker, AMQPBroker)
        assert isinstance(session, TwoSession)
        crash(store.broker, session.consumer)  # type: ignore[arg-type]  # it is this broker's


class TestAMQPBrokerAndMemoryBackend(AMQPSettlement):
    @pytest.fixture
    def open_store(self, open_brokers: Brokers, clock: PacedClock) -> OpenStore:
        backend = MemoryBackend(MemoryHub(clock))
        return lambda: TwoStores(open_brokers(), backend, clock)


class TestAMQPBrokerAndSQLiteBackend(AMQPSettlement):
    @pytest.fixture
    def open_store(
        self, open_brokers: Brokers, clock: PacedClock, tmp_path: pathlib.Path
    ) -> OpenStore:
        driver = SQLiteDriver(str(tmp_path / "states.db"), clock=clock)
        return lambda: TwoStores(open_brokers(), SQLiteBackend(driver), clock)
