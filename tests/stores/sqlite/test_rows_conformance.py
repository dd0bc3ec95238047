"""The contracts over rows in SQLite. A dying consumer releases its file's lock, like a process."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import pytest

from machinery_py.backends.sqlite_file import SQLiteBackend
from machinery_py.brokers.base import Broker, Consumer
from machinery_py.brokers.rows import RowsConsumer
from machinery_py.brokers.sqlite_file import SQLiteBroker
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.rows.sqlite_messages import SQLiteHold
from machinery_py.stores.base import Session, Store
from machinery_py.stores.rows import RowsSession, RowsStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance


class Files:
    """Each call opens the file anew, as another process would."""

    def __init__(self, path: pathlib.Path, clock: ManualClock) -> None:
        self._path = path
        self._clock = clock
        self._open: list[SQLiteDriver] = []

    def __call__(self) -> SQLiteRows:
        # It does not wait for the disk: a power cut is none of these tests' business.
        driver = SQLiteDriver(self._path, clock=self._clock, synchronous="NORMAL")
        self._open.append(driver)
        return SQLiteRows(driver)

    def close(self) -> None:
        for driver in self._open:
            driver.close()


@pytest.fixture
def open_rows(tmp_path: pathlib.Path, clock: ManualClock) -> Iterator[Files]:
    files = Files(tmp_path / "machinery.db", clock)
    yield files
    files.close()


def abandon(consumer: Consumer) -> None:
    assert isinstance(consumer, RowsConsumer)
    assert isinstance(consumer._hold, SQLiteHold)
    consumer._hold.abandon()


class TestSQLiteBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_rows: Files) -> OpenBroker:
        return lambda: SQLiteBroker(open_rows())

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
        abandon(consumer)
        broker.tend()


class TestSQLiteBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, open_rows: Files) -> OpenBackend:
        return lambda: SQLiteBackend(open_rows(), expire_in=self.expire_in)


class TestSQLiteStore(SettlementConformance):
    @pytest.fixture
    def open_store(self, open_rows: Files) -> OpenStore:
        def open_store() -> Store:
            rows = open_rows()
            return RowsStore(SQLiteBroker(rows), SQLiteBackend(rows))

        return open_store

    def crash_session(
        self, store: Store, session: Session, clock: ManualClock, survivors: Sequence[Session] = ()
    ) -> None:
        assert isinstance(session, RowsSession)
        abandon(session.consumer)
        store.tend()
