"""The contracts over PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.backends.postgresql import PostgreSQLBackend
from machinery_py.brokers.base import Broker
from machinery_py.brokers.postgresql import PostgreSQLBroker
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.stores.base import Store
from machinery_py.stores.rows import RowsStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.checkpoints import CheckpointConformance
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from machinery_py.testing.conformance.locks import LockConformance, OpenLock
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance


class Drivers:
    """Each call opens the database anew, as another process would."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self._url = url
        self._clock = clock
        self._open: list[PostgreSQLDriver] = []

    def __call__(self) -> PostgreSQLDriver:
        driver = PostgreSQLDriver(self._url, clock=self._clock, timeout=30.0)
        self._open.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._open:
            driver.close()


@pytest.fixture
def open_driver(postgres_url: str, clock: ManualClock) -> Iterator[Drivers]:
    drivers = Drivers(postgres_url, clock)
    yield drivers
    drivers.close()


class TestPostgreSQLBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_driver: Drivers) -> OpenBroker:
        return lambda: PostgreSQLBroker(open_driver())

    def count_from(self, broker: Broker, start: int, *queues: str) -> None:
        assert isinstance(broker, PostgreSQLBroker)
        broker.driver.run(
            "SELECT setval('machinery.numbers', %s)", (start,), doing="counting from there"
        )


class TestPostgreSQLBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: PostgreSQLBackend(open_driver(), expire_in=self.expire_in)


class InPostgreSQL:
    @pytest.fixture
    def open_store(self, open_driver: Drivers) -> OpenStore:
        def open_store() -> Store:
            driver = open_driver()
            return RowsStore(PostgreSQLBroker(driver), PostgreSQLBackend(driver))

        return open_store


class TestPostgreSQLStore(InPostgreSQL, SettlementConformance):
    pass


class TestPostgreSQLSchedules(InPostgreSQL, ScheduleConformance):
    pass


class TestPostgreSQLClaims(InPostgreSQL, ClaimConformance):
    pass


class TestPostgreSQLCheckpoints(InPostgreSQL, CheckpointConformance):
    pass


class TestPostgreSQLLock(LockConformance):
    @pytest.fixture
    def open_lock(self, open_driver: Drivers) -> OpenLock:
        return lambda: RowsLock(PostgreSQLRows(open_driver()))


class TestPostgreSQLLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, open_driver: Drivers) -> OpenLimits:
        return lambda: RowsLimits(PostgreSQLRows(open_driver()))
