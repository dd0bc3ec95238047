"""The tables of the PostgreSQL stores, their versions, and how they are made and changed.

tables.sql makes the tables, functions.sql the steps on them, views.sql what people read. Whoever
comes first to an empty database makes them. Later versions are made by `machinery migrate` alone:
its author decides when.

Versions go up by expanding: a script adds to what the versions before it use, and `oldest` in the
database names the oldest version of this library that can work with the tables as they are. So the
tables come first, and then the programs, one by one. What nobody uses any more goes with the next
version but one. Functions and views are made anew each time; one whose arguments or results change
gets another name, and the old one stays as long as its version is served. Whatever changes in these
files after a release is a new version, be its script empty.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from machinery_py.config.urls import redact
from machinery_py.connections.stored_items import CLAIM_LIFE, REVOKED_LIFE, StoredItem
from machinery_py.errors import StoreUnusable

# fmt: off
ITEMS = (
    StoredItem("items", "table",
               "a row per message: waiting (state 0), late (1), held (2) or, in a fair queue, "
               "waiting for its turn (3)", "until settled", "broker"),
    StoredItem("holds", "table", "a row per consumer, with its last beat",
               "until it closes or is given up", "consumer"),
    StoredItem("turns", "table",
               "of a fair queue the turn that is served, and the last one of each tenant",
               "the first for good; a tenant's until the queue is empty", "broker"),
    StoredItem("watches", "table",
               "topics and queues that a process waits for, and the channel of its notifications",
               "30 seconds; renewed", "all"),
    StoredItem("members", "table", "members of chords that have come in", "as the chord",
               "backend"),
    StoredItem("rows", "table",
               "all else, by its kind, as in SQLite: tasks, groups, dead letters, queues, "
               "schedules, unique and revoked tasks, locks, limits, records of topics",
               "`results_expire_in` for finished tasks, "
               f"{CLAIM_LIFE} for unique tasks, {REVOKED_LIFE} for revoked ones, ten minutes for "
               "submissions, `ttl` of a lock; a limit until a minute after it holds nobody back",
               "all"),
    StoredItem("schema_version", "table", "the version of the tables", "for good", "all"),
)
# fmt: on

_HERE = Path(__file__).parent
_RACED = psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected
PAUSE = 0.1, 0.5  # seconds until a migration that has met a lock is tried again

# Whoever waits for the lock of a table lets others wait behind it: so the wait is short. The lock
# of those that migrate is the transaction's: one of the session would stay with a pooler's.
_PRELUDE = """\
SET LOCAL lock_timeout = '1s';
SET LOCAL statement_timeout = 0;
SELECT pg_advisory_xact_lock(hashtext('machinery'), 1);
"""
_THERE = "SELECT to_regclass('machinery.schema_version') IS NOT NULL"
_VERSION = "SELECT version FROM machinery.schema_version"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The tables as a version of this library wants them.

    Attributes:
        tables: scripts, each of which makes the next version of the tables; the first version 1.
        anew: scripts that are run whole after them.
        oldest: version of this library that can work with these tables.
    """

    tables: tuple[Path, ...]
    anew: tuple[Path, ...]
    oldest: int

    @property
    def version(self) -> int:
        return len(self.tables)

    def script(self, since: int) -> str:
        """Return the SQL that makes these tables of those of a version; 0: of nothing."""
        found = [path.read_text() for path in (*self.tables[since:], *self.anew)]
        found.append(
            "DELETE FROM machinery.schema_version;\n"
            f"INSERT INTO machinery.schema_version VALUES ({self.version}, {self.oldest});\n"
        )
        return "\n".join(found)

    def migration(self, connection: psycopg.Connection[Any]) -> str:
        """Return what `migrate` would run now, as a script for psql; "": nothing."""
        since = _version(connection)
        if since >= self.version:
            return ""
        return f"BEGIN;\n{_PRELUDE}\n{self.script(since)}COMMIT;\n"

    def migrate(self, connection: psycopg.Connection[Any], *, patience: float) -> int:
        """Make the tables, or bring them to this version; return the one that there was, or 0.

        Args:
            patience: seconds in which it is tried again if somebody has locked a table.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._migrate(connection)
            except _RACED:
                if time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(*PAUSE))

    def _migrate(self, connection: psycopg.Connection[Any]) -> int:
        with connection.transaction():
            connection.execute(_PRELUDE.encode(), prepare=False)
            since = _version(connection)
            if since < self.version:
                connection.execute(self.script(since).encode(), prepare=False)
            return since

    def refuse(self, version: int, oldest: int, url: str) -> None:
        """Raise StoreUnusable if this version of the library cannot work with the tables."""
        if oldest > self.version:
            raise StoreUnusable(
                f"PostgreSQL at {redact(url)}: its tables have version {version}, which works with "
                f"version {oldest} or newer (this library has {self.version}: upgrade it)"
            )
        if version < self.version:
            raise StoreUnusable(
                f"PostgreSQL at {redact(url)}: its tables have version {version}, and this library "
                f"needs {self.version} (run: machinery migrate APP; what runs may go on meanwhile)"
            )


def _version(connection: psycopg.Connection[Any]) -> int:
    """Return the version of the tables; 0: there are none."""
    [(is_there,)] = connection.execute(_THERE).fetchall()
    if not is_there:
        return 0
    [(version,)] = connection.execute(_VERSION).fetchall()
    return int(version)


#: As this version of the library wants them.
OURS = Schema(
    tables=(_HERE / "tables.sql",),
    anew=(_HERE / "functions.sql", _HERE / "views.sql"),
    oldest=1,
)
