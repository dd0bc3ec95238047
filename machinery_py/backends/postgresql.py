"""States and groups in PostgreSQL: rows."""

from __future__ import annotations

from msgspec.structs import replace

from machinery_py.backends.base import BackendFeatures
from machinery_py.backends.rows import EXPIRE_IN, RowsBackend
from machinery_py.connections.durability import Concern
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.wire.bodies import JSON


class PostgreSQLBackend(RowsBackend):
    """Rows in the driver's database. The driver belongs to whoever made it."""

    features: BackendFeatures = replace(RowsBackend.features, name="postgresql")
    bodies = JSON  # for views.sql

    def __init__(self, driver: PostgreSQLDriver, *, expire_in: float = EXPIRE_IN) -> None:
        super().__init__(PostgreSQLRows(driver), expire_in=expire_in)
        self.driver = driver

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()
