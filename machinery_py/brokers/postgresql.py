"""Messages in PostgreSQL: rows, whose consumers beat."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from msgspec.structs import replace

from machinery_py.brokers.base import BrokerFeatures
from machinery_py.brokers.entries import close_all
from machinery_py.brokers.rows import LEASE, RowsBroker, RowsConsumer
from machinery_py.connections.durability import Concern
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.errors import BrokerUnavailable, PublishUnknown
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.wire.bodies import JSON


class PostgreSQLBroker(RowsBroker):
    """Rows in the driver's database. The driver belongs to whoever made it."""

    features: BrokerFeatures = replace(RowsBroker.features, name="postgresql", beats=True)
    bodies = JSON  # for views.sql
    rows: PostgreSQLRows

    def __init__(self, driver: PostgreSQLDriver, *, lease: float = LEASE) -> None:
        rows = PostgreSQLRows(driver, unavailable=BrokerUnavailable, unknown=PublishUnknown)
        super().__init__(rows, lease=lease)
        self.driver = driver
        self._consumers: weakref.WeakSet[RowsConsumer] = weakref.WeakSet()

    def consume(self, queues: Sequence[str], *, worker: str) -> RowsConsumer:
        consumer = super().consume(queues, worker=worker)
        self._consumers.add(consumer)
        return consumer

    def beat_for(self, session: str, queues: Sequence[str], *, stalled: bool) -> bool:
        del queues
        return self.rows.beat(session, stalled=stalled)

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)
