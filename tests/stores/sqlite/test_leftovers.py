"""What is left in a file when all is done and has expired: nothing that grows with use."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
from pathlib import Path

from machinery_py import Server
from machinery_py.testing.clocks import ManualClock
from tests.stores.redis.test_leftovers import work

MONTH = dt.timedelta(days=30)
#: A row of each queue, until it is forgotten; a number of each table and of the fences.
LASTING = {"queue", "sqlite_sequence"}


def contents(path: Path) -> dict[str, int]:
    """Return how many rows there are of each kind, and in each other table."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found: dict[str, int] = dict(
            connection.execute("SELECT kind, count(*) FROM rows GROUP BY kind")
        )
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (table,) in tables.fetchall():
            if table != "rows":
                [(found[table],)] = connection.execute(f"SELECT count(*) FROM {table}")
    return {name: count for name, count in found.items() if count}


def test_nothing_stays_that_grows_with_use(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    server = Server(f"sqlite:///{path}")
    for name in ("a", "b"):
        work(server, name)
    server.close()
    assert contents(path)["task"] > 20

    later = Server(f"sqlite:///{path}", clock=ManualClock(dt.datetime.now(dt.timezone.utc) + MONTH))
    with contextlib.closing(later):
        for _ in range(5):
            later.app.store.tend()

    assert contents(path).keys() <= LASTING
