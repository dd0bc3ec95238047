"""`sqlite:///file.db`: the embedded server. One machine, any number of processes."""

from __future__ import annotations

from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.config.urls import StoreUrl
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.stores.rows import RowsStore


class SQLiteFamily(Family):
    """Stores in one file, opened at the first use."""

    keeps_time = True

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        parsed = StoreUrl.parse(url)
        self._driver = SQLiteDriver(
            parsed.path,
            clock=options.clock,
            synchronous=parsed.synchronous.upper(),
            busy_timeout=parsed.busy_timeout,
        )
        self.clock = self._driver.clock
        self._rows = SQLiteRows(self._driver)

    def broker(self) -> SQLiteBroker:
        return SQLiteBroker(self._driver, lease=self.options.lease)

    def backend(self) -> SQLiteBackend:
        return SQLiteBackend(self._driver, expire_in=self.options.expire_in)

    def lock(self) -> RowsLock:
        return RowsLock(self._rows)

    def limits(self) -> RowsLimits:
        return RowsLimits(self._rows)

    def together(self) -> RowsStore:
        return RowsStore(self.broker(), self.backend())

    def close(self) -> None:
        self._driver.close()
