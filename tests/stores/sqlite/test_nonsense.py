"""Rows of ours with moments that are none: work goes on, and listings show the rest."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3

import pytest

from machinery_py import Server
from machinery_py.testing.waiting import HANG

FAR = 9 * 10**18  # µs; some 285,000 years


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE items SET put_at = {FAR}",
        f"UPDATE items SET put_at = -{FAR}",
        f"UPDATE rows SET at = {FAR} WHERE kind = 'task'",
        "INSERT INTO holds (id, body, pid, place, beat_at, lease)"
        f" SELECT 'gone', body, 1, '', {FAR}, 1 FROM holds",
        "INSERT INTO items (queue, state, priority, turn, due, put_at, body)"
        f" SELECT queue, 1, 0, 0, {FAR}, 1, body FROM items",
    ],
    ids=["sent late", "sent early", "state", "hold", "delayed"],
)
def test_moment_out_of_range_stops_no_worker(tmp_path: pathlib.Path, change: str) -> None:
    path = tmp_path / "tasks.db"
    with contextlib.closing(Server(f"sqlite:///{path}")) as server:
        add = server.register_task("add", lambda a, b: a + b)
        result = add.send(1, 2)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(change)

        with server.new_worker(concurrency=1):
            assert result.get(timeout=HANG) == 3
            for look in (server.inspect.queues, server.inspect.workers, server.inspect.tasks):
                look()
            server.inspect.dead()
            server.broker.delayed(10)
