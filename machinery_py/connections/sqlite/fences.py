"""The fences of a file. The last one is kept among SQLite's own sequences."""

from __future__ import annotations

import sqlite3

from machinery_py.fences import Fence, fence_after

_LAST = "SELECT seq FROM sqlite_sequence WHERE name = 'fences'"
_NOTE = "UPDATE sqlite_sequence SET seq = ? WHERE name = 'fences'"
_BEGIN = "INSERT INTO sqlite_sequence (name, seq) VALUES ('fences', ?)"


def next_fence(connection: sqlite3.Connection, now: int, count: int = 1) -> Fence:
    """Return the first of so many fences; the others follow it. Called inside a transaction."""
    row = connection.execute(_LAST).fetchone()
    fence = fence_after(row[0] if row else 0, now)
    connection.execute(_NOTE if row else _BEGIN, (fence + count - 1,))
    return fence
