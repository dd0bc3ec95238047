"""States and groups in a SQLite file: rows.

Limits: one machine.
"""

from __future__ import annotations

from msgspec.structs import replace

from machinery_py.backends.base import BackendFeatures
from machinery_py.backends.rows import EXPIRE_IN, RowsBackend
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.rows.sqlite import SQLiteRows


class SQLiteBackend(RowsBackend):
    """Rows in the driver's file. The driver belongs to whoever made it."""

    features: BackendFeatures = replace(RowsBackend.features, name="sqlite", embedded=True)

    def __init__(self, driver: SQLiteDriver, *, expire_in: float = EXPIRE_IN) -> None:
        super().__init__(SQLiteRows(driver), expire_in=expire_in)
        self.driver = driver
