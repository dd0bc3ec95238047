"""`sqlite:///file.db`: the embedded server. One machine, any number of processes."""

from __future__ import annotations

from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.clock import Clock
from machinery_py.config.urls import StoreUrl
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.rows.messages import MessageRows
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.stores.open import FamilyOptions
from machinery_py.stores.rows import RowsFamily


class SQLiteFamily(RowsFamily):
    """Stores in one file, opened at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        parsed = StoreUrl.parse(url)
        self._driver = SQLiteDriver(
            parsed.path,
            clock=options.clock,
            synchronous=parsed.synchronous.upper(),
            busy_timeout=parsed.busy_timeout,
        )
        self.clock: Clock = self._driver.clock
        self.rows: MessageRows = SQLiteRows(self._driver)

    def broker(self) -> SQLiteBroker:
        return SQLiteBroker(self._driver, lease=self.options.lease)

    def backend(self) -> SQLiteBackend:
        return SQLiteBackend(self._driver, expire_in=self.options.expire_in)

    def close(self) -> None:
        self._driver.close()
