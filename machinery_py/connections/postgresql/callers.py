"""Transactions of callers: the psycopg connection in what a caller has, and whose database it is.

Neither SQLAlchemy nor Django is imported: whoever has an object of one has it loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from machinery_py.config.urls import redact
from machinery_py.errors import Unsupported
from machinery_py.threads import INSIDE

Place = tuple[object, ...]
Cells = tuple[Any, ...]
Params = Sequence[object] | Mapping[str, object]

# The start of the server tells a database from a copy of all its files.
_PLACE = """
SELECT system_identifier, current_database()::text, pg_postmaster_start_time()::text
FROM pg_control_system()
"""


class _Driver(Protocol):
    """PostgreSQLDriver of client.py."""

    url: str

    def run(self, sql: str, /, *, doing: str) -> Sequence[Cells]: ...


class _Cursor(Protocol):
    def execute(self, query: Any, params: Any, /) -> object: ...
    def fetchall(self) -> Sequence[Cells]: ...
    def close(self) -> object: ...


class CallersConnection(Protocol):
    """A connection of psycopg, or SQLAlchemy's adapter of an asynchronous one."""

    @property
    def autocommit(self) -> bool: ...
    @property
    def info(self) -> psycopg.ConnectionInfo: ...
    def cursor(self) -> _Cursor: ...


def connection_in(source: object) -> CallersConnection:
    """Return the connection that an object of a caller works on now, which is in a transaction.

    Args:
        source: a connection of psycopg 3; a Session or Connection of SQLAlchemy, of an asynchronous
            one inside of `run_sync`; a connection of Django.

    Raises:
        Unsupported: it is none, or in autocommit and in no transaction.
    """
    owner, found = cast(Any, source), source
    origins = [kind.__module__ for kind in type(source).__mro__]
    if any(one.startswith("sqlalchemy.ext.asyncio") for one in origins):
        raise _refused(source, "expected the Session that run_sync gives to its function")
    if any(one.startswith("sqlalchemy.") for one in origins):
        is_session = callable(getattr(source, "connection", None))
        found = (owner.connection() if is_session else owner).connection.dbapi_connection
    elif any(one.startswith("django.") for one in origins):
        owner.ensure_connection()
        found = owner.connection
    is_psycopg = isinstance(getattr(found, "info", None), psycopg.ConnectionInfo)
    if not is_psycopg or isinstance(found, psycopg.AsyncConnection):
        raise _refused(found, "expected a connection of psycopg 3, also by SQLAlchemy or Django")
    connection = cast("CallersConnection", found)
    if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
        raise Unsupported(
            "a step cannot be part of your transaction: the connection is in autocommit, and in "
            "none (begin one: with connection.transaction(), with Django transaction.atomic())"
        )
    return connection


def ask(connection: CallersConnection, sql: str, arguments: Params = ()) -> Sequence[Cells]:
    """Run a statement in the transaction of the connection."""
    if isinstance(connection, psycopg.Connection):
        # Whatever cursors and rows the caller wants of it. A finaliser must not wait for its lock.
        with INSIDE, psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return cursor.execute(sql.encode(), arguments, prepare=False).fetchall()
    adapted = connection.cursor()
    try:
        adapted.execute(sql, arguments)
        return adapted.fetchall()
    finally:
        adapted.close()


class Places:
    """Databases of callers' connections, each asked once."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        self._own: Place = ()
        self._known: MutableMapping[object, Place] = WeakKeyDictionary()

    def check(self, connection: CallersConnection) -> None:
        """Raise Unsupported if the connection is one to another database than the driver's."""
        key = getattr(connection, "driver_connection", connection)
        place = self._known.get(key)
        if place is None:
            [place] = ask(connection, _PLACE)
            self._known[key] = place
        if place != self._own:  # behind a pooler, both may be other servers by now
            [place] = ask(connection, _PLACE)
            self._known[key] = place
            [self._own] = self._driver.run(_PLACE, doing="comparing databases")
        if place != self._own:
            raise Unsupported(
                f"a step cannot be part of your transaction: database {place[1]!r} of your "
                f"connection is not the one at {redact(self._driver.url)} "
                "(send after the commit, or by an outbox)"
            )


def _refused(found: object, hint: str) -> Unsupported:
    return Unsupported(
        f"a step cannot be part of your transaction: found {type(found).__name__} ({hint})"
    )
