"""The contracts over SQLite. A dying consumer releases its session file's lock, like a process."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import pytest

from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.base import Broker, Consumer
from machinery_py.brokers.sqlite.broker import SQLiteBroker, SQLiteConsumer
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.stores.base import Session, Store
from machinery_py.stores.rows import RowsSession, RowsStore
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
    """Each call opens the file anew, as another process would."""

    def __init__(self, path: pathlib.Path, clock: ManualClock) -> None:
        self._path = path
        self._clock = clock
        self._open: list[SQLiteDriver] = []

    def __call__(self) -> SQLiteDriver:
        # It does not wait for the disk: a power cut is none of these tests' business.
        driver = SQLiteDriver(self._path, clock=self._clock, synchronous="NORMAL")
        self._open.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._open:
            driver.close()


@pytest.fixture
def open_driver(tmp_path: pathlib.Path, clock: ManualClock) -> Iterator[Drivers]:
    drivers = Drivers(tmp_path / "machinery.db", clock)
    yield drivers
    drivers.close()


class TestSQLiteBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_driver: Drivers) -> OpenBroker:
        return lambda: SQLiteBroker(open_driver())

    def count_from(self, broker: Broker, start: int, *queues: str) -> None:
        assert isinstance(broker, SQLiteBroker)
        with broker.driver.transaction() as connection:
            connection.execute("INSERT INTO sqlite_sequence VALUES ('items', ?)", (start,))

    def crash_consumer(
        self,
        broker: Broker,
        consumer: Consumer,
        clock: ManualClock,
        survivors: Sequence[Consumer] = (),
    ) -> None:
        assert isinstance(consumer, SQLiteConsumer)
        consumer.abandon()
        broker.tend()


class TestSQLiteBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: SQLiteBackend(open_driver(), expire_in=self.expire_in)


class InSQLite:
    @pytest.fixture
    def open_store(self, open_driver: Drivers) -> OpenStore:
        def open_store() -> Store:
            driver = open_driver()
            return RowsStore(SQLiteBroker(driver), SQLiteBackend(driver))

        return open_store

    def crash_session(
        self, store: Store, session: Session, clock: ManualClock, survivors: Sequence[Session] = ()
    ) -> None:
        assert isinstance(session, RowsSession)
        assert isinstance(session.consumer, SQLiteConsumer)
        session.consumer.abandon()
        store.tend()


class TestSQLiteStore(InSQLite, SettlementConformance):
    pass


class TestSQLiteSchedules(InSQLite, ScheduleConformance):
    pass


class TestSQLiteClaims(InSQLite, ClaimConformance):
    pass


class TestSQLiteCheckpoints(InSQLite, CheckpointConformance):
    pass


class TestSQLiteLock(LockConformance):
    @pytest.fixture
    def open_lock(self, open_driver: Drivers) -> OpenLock:
        return lambda: RowsLock(SQLiteRows(open_driver()))


class TestSQLiteLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, open_driver: Drivers) -> OpenLimits:
        return lambda: RowsLimits(SQLiteRows(open_driver()))
