"""`mongodb://`, `mongodb+srv://`: a MongoDB, one server, a replica set or a sharded cluster."""

from __future__ import annotations

from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.locks.mongodb import MongoLock
from machinery_py.stores import network as _network  # noqa: F401 – for what it loads
from machinery_py.stores.family import Family, FamilyOptions
from machinery_py.stores.mongodb_store import MongoStore


class MongoDBFamily(Family):
    """Stores in one database, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._driver = MongoDriver(
            url,
            clock=options.clock,
            timeout=options.timeout,
            database=options.mongodb.database,
            strict=options.strict_durability,
        )

    def broker(self) -> MongoBroker:
        return MongoBroker(self._driver, lease=self.options.lease)

    def backend(self) -> MongoBackend:
        return MongoBackend(self._driver, expire_in=self.options.expire_in)

    def lock(self) -> MongoLock:
        return MongoLock(self._driver)

    def together(self) -> MongoStore:
        return MongoStore(self.broker(), self.backend())

    def close(self) -> None:
        self._driver.close()
