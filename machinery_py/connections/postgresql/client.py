"""Connections to one PostgreSQL, shared by broker, backend, locks and limits of a URL.

Each call is one statement in autocommit: no transaction is left open between two round trips, and a
pooler in transaction mode may stand in between. A call has a timeout on both sides: the server ends
the statement, its wait for a lock much sooner, and we end the connection if the server does not.

A process has up to CALLS connections for calls, opened when they are needed; more threads than that
wait for each other. One more listens (listening.py), and each task that runs in a transaction has
one. After a fork the child opens its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import RowFactory, tuple_row

from machinery_py.clock import SYSTEM_CLOCK, Clock, micros, moment_of
from machinery_py.config.urls import redact
from machinery_py.connections import descriptors
from machinery_py.connections.durability import Concern
from machinery_py.connections.postgresql.callers import Cells, Params, Places
from machinery_py.connections.postgresql.durability import FACTS, ServerFacts, burdens, dangers
from machinery_py.connections.postgresql.errors import (
    MISSING,
    is_harmless,
    is_pooled,
    is_raced,
    is_unknown,
    translate,
)
from machinery_py.connections.postgresql.listening import Ear
from machinery_py.connections.postgresql.schema import OURS, Schema
from machinery_py.connections.server_clock import ServerClock
from machinery_py.errors import BackendUnavailable, MachineryError, StoreUnusable
from machinery_py.texts import get_logger
from machinery_py.threads import INSIDE

logger = get_logger(__name__)

CALLS = 4  # connections
TIMEOUT = 5.0  # seconds for a connection, and for a reply
GRACE = 1.0  # seconds that the server has to end a statement by itself before we do
RACE = 0.0005, 0.01  # seconds until a call is made again that another one was in the way of
AGE = 0.5  # seconds without use after which we look whether the server has closed a connection
MIGRATION = 60.0  # seconds in which a migration is tried again that meets locks
NAME = "machinery_py"


_ONLY_SENDS = "SELECT NOT has_table_privilege('machinery.items', 'SELECT')"
# A pooler may ignore the settings of a connection: then nothing of its session is ours.
_TAKEN = "machinery.settings"
_CONNECT = (
    f"SELECT version, oldest, at, current_setting('{_TAKEN}', true) FROM machinery.connect(%s)"
)
_inherited: list[object] = []  # connections of parents, which a child must not close


class Link(psycopg.Connection[Cells]):
    """A connection whose every wait ends after `patience` seconds."""

    patience: float | None = TIMEOUT + GRACE
    longest: float = TIMEOUT + GRACE  # patience in what we call ourselves
    used_at: float = 0.0

    @contextlib.contextmanager
    def bounded(self, times: int = 1) -> Iterator[None]:
        """Let waits end in a block of ours, on a connection that is the user's.

        Args:
            times: how often the patience that we have in our own calls.
        """
        before, self.patience = self.patience, times * self.longest
        try:
            yield
        finally:
            self.patience = before

    def fileno(self) -> int:
        """Return the number of its socket; -1 if it is closed, perhaps at this moment."""
        try:
            return super().fileno()
        except psycopg.OperationalError:
            return -1

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, self.patience if timeout is None else timeout)
        except psycopg.OperationalError as error:
            if error.sqlstate is None and self.info.transaction_status is TransactionStatus.ACTIVE:
                self.pgconn.finish()  # without a reply it is lost, as by the network
            raise

    def forget_settings(self, *, is_pooled: bool) -> None:
        """Let it be as if it were new: somebody else has had it, in no transaction now."""
        self.row_factory: RowFactory[Any] = tuple_row
        self.cursor_factory: type[psycopg.Cursor[Any]] = psycopg.Cursor
        # What is prepared, the server forgets and psycopg does not: nothing may be.
        self.isolation_level = self.read_only = self.deferrable = self.prepare_threshold = None
        if not is_pooled:  # else the session is not ours
            self.execute("DISCARD ALL")

    def is_alive(self) -> bool:
        """Return whether the server has neither closed the connection nor is about to."""
        if self.closed:
            return False
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return not poll.poll(0)  # nothing is asked, so what comes is the end


class PostgreSQLDriver:
    """Opens connections when they are needed. May be used from any thread, and after a fork.

    Attributes:
        ear: notifications for the waiters of this process.
        places: databases of callers' connections.
        schema: the tables that it wants.
        only_sends: its role may send, and no more; known from the first connection on.
        in_hand: by consumer of this process what it has claimed and not ended (rows keep it).
        is_pooled: a pooler stands in between, which takes no settings: its sessions may be those of
            others, too, so nothing is listened for, set or prepared.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        timeout: float = TIMEOUT,
        strict: bool = False,
        schema: Schema = OURS,
    ) -> None:
        self.url = url
        self.schema = schema
        self._strict = strict
        self._is_checked = False
        self.clock: Final = ServerClock(
            clock, lambda: self.run("SELECT 1", doing="looking at its clock")
        )
        self.timeout = timeout
        self.is_pooled: bool = False
        self.only_sends: bool = False
        self.in_hand: dict[str, set[Any]] = {}
        self._links = _Links(self.open, CALLS, timeout)
        self._own = _Links(self._open_own, sys.maxsize, timeout)
        self.ear: Final = Ear(self)
        self.places: Final = Places(self)

    @property
    def losses(self) -> int:
        """How many connections were lost: behind the next one may be a server that knows less."""
        return self._links.losses

    def now(self) -> int:
        """Return µs since 1970, by the server's clock (by `clock`, if that is not the system's)."""
        return micros(self.clock.now())

    def given_now(self) -> int | None:
        """Return the moment that a function takes: in tests; else the server looks at its clock."""
        return None if self.clock.is_system else self.now()

    def run(
        self,
        sql: str,
        arguments: Params = (),
        *,
        doing: str,
        away: type[MachineryError] = BackendUnavailable,
        lost: type[MachineryError] | None = None,
        sender: str = "",
    ) -> list[Cells]:
        """Run a statement, and return its rows.

        Args:
            sender: the same for a role that may send, and no more, if it may do this.
            away: raised when nothing was done.
            lost: raised when it may have been carried out (as `away`, if not given).
        """
        deadline = time.monotonic() + self.timeout
        while True:
            link = None
            INSIDE.depth += 1  # a signal handler must not wait for the connections of its thread
            try:
                link = self._links.take(deadline)
                if self.clock.is_due:
                    self._ask(link)
                statement = sender or sql if self.only_sends else sql
                cursor = link.execute(statement.encode(), arguments, binary=True)
                rows = cursor.fetchall() if cursor.description else []
                self._links.give_back(link)
                return rows
            except psycopg.Error as error:
                self._links.give_back(link, error)
                self.is_pooled |= is_pooled(error)
                if (is_pooled(error) or is_raced(error)) and time.monotonic() < deadline:
                    time.sleep(random.uniform(*RACE))
                    continue
                kind = lost if lost and link is not None and is_unknown(error) else away
                raise translate(error, self.url, doing=doing, away=kind) from error
            except BaseException as error:
                self._links.give_back(link, error)
                raise
            finally:
                INSIDE.depth -= 1

    def begin(self) -> Link:
        """Return a connection for a transaction of the caller, who gives it to `end`."""
        return self._own.take(time.monotonic() + self.timeout)

    def end(self, link: Link) -> None:
        """Take back a connection; if it is in a transaction, that is rolled back, and it closed."""
        try:
            if link.info.transaction_status is not TransactionStatus.IDLE:
                link.close()
            if not link.closed:
                with link.bounded():
                    link.forget_settings(is_pooled=self.is_pooled)
        except BaseException as error:
            link.close()
            if not isinstance(error, psycopg.Error):
                raise
        finally:
            self._own.give_back(link, psycopg.OperationalError() if link.closed else None)

    def _open_own(self) -> Link:
        """Return a connection with the settings of the server, for as long as its work takes."""
        self.run("SELECT 1", doing="beginning a transaction")  # so that the tables are there
        link = self._link(self._options())
        link.patience = None
        return link

    def open(self) -> Link:
        """Return a new connection, which the caller closes; the tables are there."""
        link = self._connect()
        try:
            self._begin(link)
        except BaseException:
            link.close()
            raise
        link.used_at = time.monotonic()
        return link

    def _options(self) -> dict[str, Any]:
        """Return what the URL does not say."""
        wanted = conninfo.conninfo_to_dict(self.url)
        ours = {
            "connect_timeout": max(2, round(self.timeout)),
            "application_name": NAME,
            "client_encoding": "utf8",  # of a database in SQL_ASCII, texts would come as bytes
            # A partition ends the waits that have no end of their own: those of users.
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            "target_session_attrs": "read-write" if "," in str(wanted.get("host")) else "any",
        }
        return {name: value for name, value in ours.items() if name not in wanted}

    def _connect(self) -> Link:
        ours, wanted = self._options(), conninfo.conninfo_to_dict(self.url)
        milliseconds = max(1, int(self.timeout * 1000))
        settings = (
            f"-c statement_timeout={milliseconds} -c lock_timeout={max(1, milliseconds // 5)}"
            f" -c idle_in_transaction_session_timeout={milliseconds}"
            f" -c default_transaction_isolation=read\\ committed -c {_TAKEN}=taken"
            f" {wanted.get('options') or ''}"
        )
        if not self.is_pooled:
            try:
                return self._link(ours | {"options": settings.strip()})
            except psycopg.OperationalError as error:
                if "unsupported startup parameter" not in str(error):
                    raise
                self.is_pooled = True
        return self._link(ours)

    def _link(self, settings: dict[str, Any]) -> Link:
        link = Link.connect(self.url, autocommit=True, prepare_threshold=None, **settings)
        link.patience = link.longest = self.timeout + GRACE
        descriptors.keep(link)
        return link

    def _begin(self, link: Link) -> None:
        """Make sure of the tables."""
        try:
            version, oldest, _, taken = self._ask(link)
        except psycopg.Error as error:
            if error.sqlstate not in MISSING:
                raise
            version, oldest, taken = 0, 0, None
        if not version:
            self._make_tables(link)
            version, oldest, _, taken = self._ask(link)
        self.schema.refuse(version, oldest, self.url)
        self.is_pooled |= taken is None
        link.prepare_threshold = None if self.is_pooled else 0
        if not self._is_checked:
            self._check(link)

    def _make_tables(self, link: Link) -> None:
        try:
            self.schema.migrate(link, patience=self.timeout)
        except psycopg.errors.InsufficientPrivilege as error:
            info = link.info
            raise StoreUnusable(
                f"PostgreSQL at {redact(self.url)}: it has no tables yet, and role {info.user!r} "
                f'may not make them (GRANT CREATE ON DATABASE "{info.dbname}" TO "{info.user}", or '
                "let a role that may run: machinery migrate APP)"
            ) from error

    def migration(self) -> str:
        """Return the SQL that `migrate` would run; "": nothing is to be done."""
        with self._migrating() as link:
            return self.schema.migration(link)

    def migrate(self) -> tuple[int, int]:
        """Bring the tables to the version of this library; return that before it, and now."""
        with self._migrating() as link:
            before = self.schema.migrate(link, patience=MIGRATION)
            return before, max(before, self.schema.version)

    @contextlib.contextmanager
    def _migrating(self) -> Iterator[Link]:
        try:
            with contextlib.closing(self._connect()) as link:
                link.patience = None  # an index may take its time
                yield link
        except psycopg.Error as error:
            away = BackendUnavailable
            raise translate(error, self.url, doing="migrating", away=away) from error

    def _check(self, link: Link) -> None:
        """Refuse, or tell, that what it confirms may be lost."""
        found = dangers(ServerFacts(*link.execute(FACTS).fetchall()[0]))
        if self._strict and found:
            reasons = "; ".join(one.text for one in found)
            place = redact(self.url)
            raise StoreUnusable(f"PostgreSQL at {place}: refused by strict_durability: {reasons}")
        for one in found:
            logger.warning("PostgreSQL at %s: %s", redact(self.url), one.text)
        [(self.only_sends,)] = link.execute(_ONLY_SENDS).fetchall()
        self._is_checked = True

    def concerns(self) -> list[Concern]:
        """Return what is wrong with the server now."""
        [row] = self.run(FACTS, doing="looking at its settings")
        facts = ServerFacts(*row)
        return [*dangers(facts), *burdens(facts, is_pooled=self.is_pooled)]

    def _ask(self, link: Link) -> Cells:
        """Return the versions of the tables, and measure the clock."""
        if not self.clock.is_system:
            [row] = link.execute(_CONNECT, (self.now(),)).fetchall()
            return row
        found: list[Cells] = []

        def read() -> Any:
            found[:] = link.execute(_CONNECT, (None,)).fetchall()
            return moment_of(found[0][2])

        self.clock.measure(read)
        return found[0]

    def close(self) -> None:
        """Close the connections. May be called twice; the next use opens anew."""
        self.ear.close()
        self._links.close()
        self._own.close()


class _Links:
    """Connections of one kind: those that are idle, and how many there are."""

    def __init__(self, new: Callable[[], Link], most: int, timeout: float) -> None:
        self._new = new
        self._most = most
        self._timeout = timeout
        self.losses = 0
        self._begin_process()

    def _begin_process(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._idle: list[Link] = []
        self._number = 0

    def take(self, deadline: float) -> Link:
        """Return a connection, which the caller gives back or drops."""
        if self._pid != os.getpid():
            _inherited.extend(self._idle)  # closing one would end the parent's
            self._begin_process()
        link = self._idle_one(deadline)
        try:
            if link is not None:
                if time.monotonic() - link.used_at < AGE or link.is_alive():
                    return link
                link.close()
                self.losses += 1
            return self._new()
        except BaseException:
            self._forget(1)
            raise

    def _idle_one(self, deadline: float) -> Link | None:
        """Return a connection that may be closed; None: another one may be opened."""
        with self._changed:
            while not self._idle:
                if self._number < self._most:
                    self._number += 1
                    return None
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise psycopg.OperationalError(
                        f"all {self._most} connections are busy: no answer within "
                        f"{self._timeout:g} s"
                    )
            return self._idle.pop()

    def give_back(self, link: Link | None, error: BaseException | None = None) -> None:
        """Let the next thread have it, unless something is wrong with the connection itself."""
        if link is None:
            return
        if error is None or is_harmless(error):
            link.used_at = time.monotonic()
            with self._changed:
                self._idle.append(link)
                self._changed.notify()
        else:
            link.close()
            self.losses += 1
            self._forget(1)

    def _forget(self, number: int) -> None:
        with self._changed:
            self._number -= number
            self._changed.notify_all()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._changed:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()
        self._forget(len(idle))
