"""Topics in a SQLite file: one table of records, and named pipes of those that wait for some.

The id is the place of a record among those of all topics, the number its place in its own: a reader
that finds a gap in the numbers has missed what was deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from machinery_py.brokers.topics import TOPIC_AGE, TOPIC_LENGTH, Subscription, check_records
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.rows import insert_rows

READ = 500  # records of one `read`

_SEND = "INSERT INTO topics (topic, number, sent_at, until, body)"
_LAST = "SELECT coalesce(max(number), 0) FROM topics WHERE topic = ?"

# In: now, topic, the last number that is too many.
_FORGET = "DELETE FROM topics WHERE until <= ? OR topic = ? AND number <= ?"

# In: topic, oldest moment. Out: the id before which a subscription begins; that behind all, if
# nothing is so new.
_BEGIN = """
SELECT coalesce((SELECT min(id) - 1 FROM topics WHERE topic = ? AND sent_at >= ?),
                (SELECT max(id) FROM topics), 0)
"""
_READ = "SELECT id, number, until, body FROM topics WHERE topic = ? AND id > ? ORDER BY id LIMIT ?"


def broadcast(driver: SQLiteDriver, topic: str, records: Sequence[bytes], ttl: float) -> None:
    """Insert the records, and wake all that wait for records."""
    check_records(topic, records)
    if not records:
        return
    now = driver.now()
    until = now + int(min(ttl, TOPIC_AGE) * 1e6)
    with driver.claiming() as connection:
        last: int = connection.execute(_LAST, (topic,)).fetchone()[0]
        numbered = enumerate(records, last + 1)
        rows = [(topic, number, now, until, bytes(body)) for number, body in numbered]
        insert_rows(connection, _SEND, rows)
        connection.execute(_FORGET, (now, topic, last + len(rows) - TOPIC_LENGTH))
        driver.notify("t")


class SQLiteSubscription(Subscription):
    """The id of the last record that was read, and a notifier."""

    def __init__(self, driver: SQLiteDriver, topic: str, since: float) -> None:
        self._driver = driver
        self._topic = topic
        self._notifier = driver.notifier("t")
        self._closed = False
        oldest = driver.now() - int(since * 1e6) if since > 0 else 2**62
        with driver.reading() as connection:
            self._after: int = connection.execute(_BEGIN, (topic, oldest)).fetchone()[0]
            self._next = connection.execute(_LAST, (topic,)).fetchone()[0] + 1

    def read(self, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        found = self._read()
        if found or timeout <= 0 or self._notifier.woken():
            return found
        with self._notifier:
            while not self._closed:
                # Once more now that the pipe exists: what came before has not notified it.
                if found := self._read():
                    return found
                left = deadline - time.monotonic()
                if left <= 0 or self._notifier.wait(left):
                    break
        return []

    def _read(self) -> list[bytes]:
        if self._closed:
            return []
        with self._driver.reading() as connection:
            rows = connection.execute(_READ, (self._topic, self._after, READ)).fetchall()
        if not rows:
            return []
        now = self._driver.now()
        found = [body for _, _, until, body in rows if until > now]
        self._after = rows[-1][0]
        self._pass([number for _, number, _, _ in rows], len(found))
        return found

    def wake(self) -> None:
        self._notifier.wake()

    def close(self) -> None:
        self._closed = True
        self._notifier.wake()
