"""Topics in a SQLite file: one table of records, and named pipes of those that wait for some.

The id is the place of a record among those of all topics, the number its place in its own: a reader
that finds a gap in the numbers has missed what was deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

from machinery_py.brokers.topics import READ, TOPIC_LENGTH, KeptRecord, KeptSubscription
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.rows import insert_rows

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

# In: now, topic, id of the last record that was read, how many. Out: records, as bytes, whatever
# others have put there.
_READ = """
SELECT id, number, iif(until > ?, CAST(body AS BLOB), NULL) FROM topics
WHERE topic = ? AND id > ? ORDER BY id LIMIT ?
"""


def append_records(driver: SQLiteDriver, topic: str, records: Sequence[bytes], ttl: float) -> None:
    """Insert the records, and wake all that wait for records."""
    now = driver.now()
    until = now + int(ttl * 1e6)
    with driver.claiming() as connection:
        last: int = connection.execute(_LAST, (topic,)).fetchone()[0]
        numbered = enumerate(records, last + 1)
        rows = [(topic, number, now, until, body) for number, body in numbered]
        insert_rows(connection, _SEND, rows)
        connection.execute(_FORGET, (now, topic, last + len(rows) - TOPIC_LENGTH))
        driver.notify("t")


class SQLiteSubscription(KeptSubscription):
    """The id of the last record that was read, and a notifier."""

    def __init__(self, driver: SQLiteDriver, topic: str, since: float) -> None:
        super().__init__()
        self._driver = driver
        self._topic = topic
        self._notifier = driver.notifier("t")
        oldest = driver.now() - int(since * 1e6) if since > 0 else 2**62
        with driver.reading() as connection:
            self._after = connection.execute(_BEGIN, (topic, oldest)).fetchone()[0]
            self._next = connection.execute(_LAST, (topic,)).fetchone()[0] + 1

    def _fetch(self, wait: float) -> list[KeptRecord]:
        with self._notifier:  # first its pipe, then the look: what comes behind that is notified
            now = self._driver.now()
            with self._driver.reading() as connection:
                found = connection.execute(_READ, (now, self._topic, self._after, READ)).fetchall()
            if not found and wait:
                self._notifier.wait(wait)
        return found

    def wake(self) -> None:
        super().wake()
        self._notifier.wake()
