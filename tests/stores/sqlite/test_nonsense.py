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
        f"UPDATE messages SET sent_at = {FAR}",
        f"UPDATE messages SET sent_at = -{FAR}",
        f"UPDATE tasks SET created_at = {FAR}, started_at = -{FAR}",
        "INSERT INTO sessions (key, worker, host, pid, place, queues, started_at, beat_at)"
        f" VALUES ('gone', 'ada', 'there', 1, '', '[]', {FAR}, {FAR})",
        "INSERT INTO dead (uuid, name, queue, reason, error, strikes, died_at, body)"
        f" VALUES ('u', 'add', 'machinery_tasks', 'poison', '', 3, {FAR}, x'93')",
        "INSERT INTO messages (queue, uuid, name, priority, status, due_at, parks, sent_at, body)"
        f" VALUES ('machinery_tasks', 'u', 'add', 0, 1, {FAR}, 0, 1, x'93')",
    ],
    ids=["sent late", "sent early", "state", "session", "dead letter", "delayed"],
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
