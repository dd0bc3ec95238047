"""Messages in a SQLite file: rows, and topics as a table of their own.

Limits: one machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from msgspec.structs import replace

from machinery_py.brokers.base import BrokerFeatures
from machinery_py.brokers.entries import close_all
from machinery_py.brokers.rows import LEASE, RowsBroker, RowsConsumer
from machinery_py.brokers.sqlite.topics import SQLiteSubscription, append_records
from machinery_py.connections import session_files
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.errors import BrokerUnavailable
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.rows.sqlite_messages import SQLiteHold

LOOK = 0.5  # seconds between two looks for dead consumers


class SQLiteBroker(RowsBroker):
    """Rows in the driver's file. The driver belongs to whoever made it."""

    features: BrokerFeatures = replace(RowsBroker.features, name="sqlite", embedded=True)

    def __init__(self, driver: SQLiteDriver, *, lease: float = LEASE) -> None:
        super().__init__(SQLiteRows(driver, unavailable=BrokerUnavailable), lease=lease)
        self.driver = driver
        self._consumers: weakref.WeakSet[SQLiteConsumer] = weakref.WeakSet()

    def consume(self, queues: Sequence[str], *, worker: str) -> SQLiteConsumer:
        consumer = SQLiteConsumer(self, tuple(queues), worker)
        self._consumers.add(consumer)
        return consumer

    def reap(self) -> int:
        """Give back what dead consumers held; return how many were dead. `tend` does it too."""
        return self.rows.reap()

    def tend(self) -> float:
        self.driver.check()
        interval = super().tend()
        if all(session_files.is_own(hold.id) for hold in self.rows.holds()):
            return interval
        return min(interval, LOOK)

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        append_records(self.driver, topic, records, ttl)

    def subscribe(self, topic: str, *, since: float = 0.0) -> SQLiteSubscription:
        return SQLiteSubscription(self.driver, topic, since)

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)


class SQLiteConsumer(RowsConsumer):
    """A hold of the file."""

    def abandon(self) -> None:
        """Release only the lock that proves this consumer alive, as a dying process does."""
        assert isinstance(self._hold, SQLiteHold)
        self._hold.abandon()
