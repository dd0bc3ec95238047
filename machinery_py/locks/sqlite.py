"""Locks in a SQLite file.

Table: connections/sqlite/schema.py.

Limits: one machine. Time is the clock's on the wall: who sets it ahead ends what is held.
"""

from __future__ import annotations

import datetime as dt
import secrets

from machinery_py.clock import moment_of
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.fences import next_fence
from machinery_py.errors import BackendUnavailable
from machinery_py.locks.base import Lock, LockHolding

# In: fence, name, token, until when. Out: a row, unless somebody has the name.
_ACQUIRE = (
    "INSERT INTO locks (id, name, token, expires_at) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (name) DO NOTHING"
)


class SQLiteLock(Lock):
    """Rows in the driver's file. The driver belongs to whoever made it."""

    def __init__(self, driver: SQLiteDriver) -> None:
        self._driver = driver

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        now = self._driver.now()
        with self._driver.reading() as connection:
            # Most who lose find out here, without keeping a writer waiting.
            taken = connection.execute(
                "SELECT 1 FROM locks WHERE name = ? AND expires_at > ?", (name, now)
            ).fetchone()
        if taken is not None:
            return None
        token = secrets.token_hex(16)
        with self._driver.transaction(BackendUnavailable) as connection:
            now = self._driver.now()
            until = now + _micros(ttl)
            connection.execute("DELETE FROM locks WHERE expires_at <= ?", (now,))
            fence = next_fence(connection, now)
            cursor = connection.execute(_ACQUIRE, (fence, name, token, until))
        if cursor.rowcount == 0:
            return None
        return LockHolding(name=name, token=token, fence=fence, expires_at=moment_of(until))

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        with self._driver.transaction(BackendUnavailable) as connection:
            now = self._driver.now()
            return (
                connection.execute(
                    "UPDATE locks SET expires_at = ? "
                    "WHERE name = ? AND token = ? AND expires_at > ?",
                    (now + _micros(ttl), held.name, held.token, now),
                ).rowcount
                > 0
            )

    def release(self, held: LockHolding) -> bool:
        with self._driver.transaction(BackendUnavailable) as connection:
            return (
                connection.execute(
                    "DELETE FROM locks WHERE name = ? AND token = ? AND expires_at > ?",
                    (held.name, held.token, self._driver.now()),
                ).rowcount
                > 0
            )

    def close(self) -> None:
        pass  # the driver belongs to whoever made it


def _micros(seconds: float) -> int:
    return dt.timedelta(seconds=seconds) // dt.timedelta(microseconds=1)
