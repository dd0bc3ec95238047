"""Outbox in the transactions of SQLAlchemy: `outbox.send(session, call)`.

The call is a row of the session's transaction. A relay publishes it after the commit; see
docs/how-to/outbox.md for its use, and contrib/outbox.py for what happens at each crash.

Limits: PostgreSQL, MySQL 8, MariaDB 10.6 or SQLite in a file.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from machinery_py.contrib.kept_calls import encode_kept, keeping
from machinery_py.contrib.outbox import (
    AnyOutbox,
    LockedRows,
    OutboxTable,
    check_file,
    ended_after,
    forget_notices,
)
from machinery_py.errors import ConfigError
from machinery_py.tasks.signature import Step
from machinery_py.texts import cut

try:
    import sqlalchemy as sa
    from sqlalchemy import event
    from sqlalchemy.dialects import mysql
    from sqlalchemy.engine import TwoPhaseTransaction
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import Session, scoped_session
    from sqlalchemy.pool import NullPool
except ImportError as _error:
    raise ImportError(
        "machinery_py.contrib.sqlalchemy needs SQLAlchemy 2: pip install 'machinery_py[sqlalchemy]'"
    ) from _error

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession  # needs greenlet

    from machinery_py.server import Server

LOCKING = ("postgresql", "mysql", "mariadb")  # dialects with SKIP LOCKED
#: Drivers for coroutines → those that the relay uses in their place.
SYNC_DRIVERS = {
    "postgresql+asyncpg": "postgresql+psycopg",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "mysql+aiomysql": "mysql+pymysql",
    "mysql+asyncmy": "mysql+pymysql",
    "mariadb+aiomysql": "mariadb+pymysql",
    "mariadb+asyncmy": "mariadb+pymysql",
    "sqlite+aiosqlite": "sqlite",
}


class Outbox(AnyOutbox):
    """Calls that are sent if, and only if, a transaction is committed. Any thread may use it.

    Args:
        server: sends the calls. Its setting `application` (else `default_queue`) is in each row,
            and a relay publishes the rows of its own alone.
        engine: of the relay, or its URL. Sessions may have another one to the same database.
        metadata: where the table is declared, for instance `Base.metadata`; by default its own.
        table, schema: name of the table.

    Attributes:
        table: the `sqlalchemy.Table`, for migrations.
    """

    def __init__(
        self,
        server: Server,
        engine: sa.Engine | AsyncEngine | sa.URL | str,
        *,
        metadata: sa.MetaData | None = None,
        table: str = "machinery_outbox",
        schema: str | None = None,
    ) -> None:
        super().__init__(server, f"{schema}.{table}" if schema else table)
        self._given = engine
        self._made: sa.Engine | None = None
        self.table: sa.Table = _table(
            table, metadata if metadata is not None else sa.MetaData(), schema
        )
        self._application = server.config.application or server.config.default_queue
        name = f"{self.table.fullname} {self._application}"
        self._channel = f"machinery_{hashlib.sha256(name.encode()).hexdigest()[:20]}"

    def create(self, bind: sa.Engine | sa.Connection | None = None) -> None:
        """Create the table if it is not there. With Alembic it is a table like all others."""
        self.table.create(bind if bind is not None else self.engine, checkfirst=True)

    @property
    def engine(self) -> sa.Engine:
        """Engine of the relay, which has no coroutines."""
        if isinstance(self._given, sa.Engine):
            return self._given
        if self._made is None:
            given = self._given
            url = sa.make_url(given if isinstance(given, str | sa.URL) else given.url)
            url = url.set(drivername=SYNC_DRIVERS.get(url.drivername, url.drivername))
            self._made = sa.create_engine(url, poolclass=NullPool)
        return self._made

    def send(self, session: Session | scoped_session[Any], step: Step[Any]) -> Any:
        """Send a call, chain, group or chord with the session's transaction.

        Returns:
            The result, which has its UUID now. It is PENDING until the call is published; after a
                rollback it stays so.

        Raises:
            ArgumentError, NameRefused, Unsupported, WorkflowError: as `Server.send`.
            SQLAlchemyError: the row could not be inserted.
        """
        if isinstance(session, scoped_session):
            session = session()
        if not isinstance(session, Session):
            raise TypeError(
                f"outbox.send: a session is needed, not {type(session).__name__} "
                "(in coroutines: await outbox.send_async(session, …))"
            )
        with keeping(self.server, step) as (kept, result):
            if kept is not None:
                row = {
                    "application": self._application,
                    "uuid": kept.uuid,
                    "name": cut(kept.name, 200),
                    "created_at": dt.datetime.now(dt.timezone.utc),
                    "body": encode_kept(kept),
                }
                self._insert(session, row)
        return result

    async def send_async(self, session: AsyncSession, step: Step[Any]) -> Any:
        """`send` for an AsyncSession."""
        return await session.run_sync(lambda inner: self.send(inner, step))

    def _insert(self, session: Session, row: Mapping[str, object]) -> None:
        insert = sa.insert(self.table).values(row)
        connection = session.connection(bind_arguments={"clause": insert})
        # PostgreSQL cannot prepare a transaction with a NOTIFY; the relay's poll finds such a row.
        is_prepared = isinstance(connection.get_transaction(), TwoPhaseTransaction)
        if connection.dialect.name == "postgresql" and not is_prepared:
            insert = insert.returning(sa.func.pg_notify(self._channel, ""))
        connection.execute(insert)
        if not event.contains(session, "after_commit", self._committed):
            event.listen(session, "after_commit", self._committed)

    def _committed(self, session: Session) -> None:
        self._wake()

    def _open_table(self) -> OutboxTable:
        dialect, database = self.engine.dialect.name, self.engine.url.database or ""
        if dialect not in (*LOCKING, "sqlite"):
            raise ConfigError(
                f"an outbox cannot be in {dialect} (known: {', '.join(LOCKING)}, sqlite)"
            )
        if dialect == "sqlite":
            if database in ("", ":memory:") or "mode=memory" in database:
                raise ConfigError("a relay cannot read SQLite in memory (use a file)")
            check_file(self.server, database)
        return SQLTable(self.engine, self.table, self._application, self._channel)


def _table(name: str, metadata: sa.MetaData, schema: str | None) -> sa.Table:
    """Declare the table, unless this MetaData has it."""
    known = metadata.tables.get(f"{schema}.{name}" if schema else name)
    if known is not None:
        return known
    return sa.Table(
        name,
        metadata,
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            primary_key=True,
            autoincrement=True,
        ),
        sa.Column("application", sa.String(255), nullable=False),
        sa.Column("uuid", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "body",
            # MySQL's BLOB ends at 64 KB.
            sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb"),
            nullable=False,
        ),
        sa.Column("failed_at", sa.DateTime(timezone=True)),
        sa.Column("error", sa.Text()),
        schema=schema,
        sqlite_autoincrement=True,
    )


class SQLTable(OutboxTable):
    """The rows of one application in a table."""

    def __init__(self, engine: sa.Engine, table: sa.Table, application: str, channel: str) -> None:
        self.name: str = table.fullname
        self._engine = engine
        self._table = table
        self._channel = channel
        self._waiting = (table.c.application == application) & table.c.failed_at.is_(None)
        self._listener: Any = None  # the driver's connection
        self._locks = engine.dialect.name in LOCKING

    def is_waiting(self) -> bool:
        with self._engine.connect() as connection:
            found = connection.execute(sa.select(self._table.c.id).where(self._waiting).limit(1))
            return found.first() is not None

    @contextmanager
    def take(self, limit: int, life: float) -> Iterator[LockedRows]:
        table = self._table
        with self._engine.connect() as connection:
            if self._locks:  # whatever the engine has: each statement sees what was committed
                connection.execution_options(isolation_level="READ COMMITTED")
            with connection.begin():
                if connection.dialect.name == "postgresql":
                    connection.exec_driver_sql(ended_after(life))
                yield (batch := LockedRows(self._rows(connection, limit)))
                if batch.done:
                    connection.execute(sa.delete(table).where(table.c.id.in_(batch.done)))
                for number, text in batch.refused.items():
                    aside = {"failed_at": dt.datetime.now(dt.timezone.utc), "error": text}
                    connection.execute(sa.update(table).where(table.c.id == number).values(aside))

    def _rows(self, connection: sa.Connection, limit: int) -> Sequence[tuple[int, bytes]]:
        ids = sa.select(self._table.c.id).where(self._waiting).order_by(self._table.c.id)
        oldest = ids.add_columns(self._table.c.body).limit(limit)
        if not self._locks:
            # A write, so that this transaction has the lock of the file before it reads.
            connection.execute(sa.delete(self._table).where(sa.false()))
            return [(row.id, bytes(row.body)) for row in connection.execute(oldest)]
        rows = connection.execute(oldest.with_for_update(skip_locked=True)).all()
        # Another relay may have locked older ones, or some in between, for a moment.
        first = connection.scalars(ids.limit(len(rows))).all() if rows else []
        ours = takewhile(lambda pair: pair[0].id == pair[1], zip(rows, first, strict=False))
        return [(row.id, bytes(row.body)) for row, _ in ours]

    def listen(self) -> Sequence[int]:
        if self._engine.dialect.name != "postgresql" or not self._engine.driver.startswith(
            "psycopg"
        ):
            return ()
        if self._listener is None:
            self._engine.connect().close()  # the first one of an engine, which sets up its dialect
            # Beside the engine's pool, which may have room for one connection.
            connection = self._engine.pool.recreate().connect()
            self._listener = connection.driver_connection
            connection.detach()
            self._listener.rollback()
            self._listener.autocommit = True
            self._listener.cursor().execute(f'LISTEN "{self._channel}"')
        return (self._listener.fileno(),)

    def heard(self) -> None:
        if self._listener is not None:
            forget_notices(self._listener)

    def text_of(self, error: Exception) -> str:
        # SQLAlchemy's own text holds the parameters of the statement.
        own = error.orig if isinstance(error, DBAPIError) and error.orig else error
        return f"{type(own).__name__}: {own}"

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(Exception):  # of any driver; it is closed in any case
                listener.close()
