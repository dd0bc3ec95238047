"""One SQLite file, and what tests of its driver ask of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery_py.brokers.base import Message
from machinery_py.connections.sqlite.database import SQLiteDriver

ADD_QUEUE = "INSERT INTO rows (kind, id, version, body) VALUES ('queue', ?, 1, x'')"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machinery.db"


@pytest.fixture
def driver(path: Path) -> Iterator[SQLiteDriver]:
    driver = SQLiteDriver(path)
    yield driver
    driver.close()


def message(number: int = 0, size: int = 10) -> Message:
    return Message(uuid=f"task_{number}", name="add", queue="q", body=b"x" * size)


def queues(driver: SQLiteDriver) -> set[str]:
    with driver.reading() as connection:
        return {
            name
            for (name,) in connection.execute("SELECT id FROM rows WHERE kind = 'queue'").fetchall()
        }


def integrity(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    finally:
        connection.close()
