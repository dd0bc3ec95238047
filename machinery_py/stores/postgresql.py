"""`postgresql://`, `postgres://`: one database, or a primary and its replicas."""

from __future__ import annotations

from machinery_py.clock import Clock
from machinery_py.errors import ConfigError
from machinery_py.rows.messages import MessageRows

try:
    import psycopg as _psycopg  # noqa: F401 - says which package is missing, before ours fail
except ImportError as _error:
    raise ConfigError(
        "postgresql:// needs psycopg 3: pip install 'machinery_py[postgres]'"
    ) from _error

from machinery_py.backends.postgresql import PostgreSQLBackend
from machinery_py.brokers.postgresql import PostgreSQLBroker
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.stores.open import FamilyOptions
from machinery_py.stores.rows import RowsFamily


class PostgreSQLFamily(RowsFamily):
    """Stores in one database, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._driver = PostgreSQLDriver(
            url,
            clock=options.clock,
            timeout=options.timeout,
            strict=options.strict_durability,
        )
        self.clock: Clock = self._driver.clock
        self.rows: MessageRows = PostgreSQLRows(self._driver)

    def broker(self) -> PostgreSQLBroker:
        return PostgreSQLBroker(self._driver, lease=self.options.lease)

    def backend(self) -> PostgreSQLBackend:
        return PostgreSQLBackend(self._driver, expire_in=self.options.expire_in)

    def migration(self) -> str:
        return self._driver.migration()

    def migrate(self) -> tuple[int, int]:
        return self._driver.migrate()

    def close(self) -> None:
        self._driver.close()
