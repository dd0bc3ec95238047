"""States and groups in a SQLite file: rows.

Limits: one machine. Each task that ends wakes all that wait for one.
"""

from __future__ import annotations

from machinery_py.backends.base import BackendFeatures
from machinery_py.backends.rows import RowsBackend


class SQLiteBackend(RowsBackend):
    """Rows in a driver's file."""

    features = BackendFeatures(name="sqlite", embedded=True, claims=True)
