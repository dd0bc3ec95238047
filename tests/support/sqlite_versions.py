"""SQLite files as older versions of the library left them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

VERSION_9 = Path(__file__).parents[1] / "connections" / "sqlite" / "version_9.sql"


def make_first_version(path: Path) -> None:
    """Make a file, and take away what later versions added."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(VERSION_9.read_text())
        _to_first_version(connection)


def _to_first_version(connection: sqlite3.Connection) -> None:
    """Take away what versions 2 to 9 added; a column keeps its content under another name."""
    connection.execute("DROP TABLE records")
    connection.execute("DROP TABLE paused")
    connection.execute("DROP TABLE claims")
    connection.execute("DROP TABLE topics")
    connection.execute("DROP TABLE limits")
    connection.execute("DROP TABLE turns")
    connection.execute("DROP INDEX messages_turnless")
    connection.execute("DROP INDEX messages_waiting")
    connection.execute(
        "CREATE INDEX messages_waiting ON messages (queue, status, priority DESC) WHERE status = 0"
    )
    for name in ("tenant", "turn"):
        connection.execute(f"ALTER TABLE messages RENAME COLUMN {name} TO {name}_later")
    connection.execute("ALTER TABLE tasks RENAME COLUMN notes_json TO older")
    connection.execute("ALTER TABLE tasks RENAME COLUMN keep_for TO oldest")
    for name in ("root", "parent"):
        connection.execute(f"ALTER TABLE tasks RENAME COLUMN {name} TO {name}_later")
    connection.execute("ALTER TABLE groups RENAME COLUMN plan TO plan_later")
    connection.execute("PRAGMA user_version = 1")
