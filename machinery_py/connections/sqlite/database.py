"""One SQLite file of broker, backend and lock: connections, transactions, notifiers and checks.

    <file>, <file>-wal, <file>-shm    the database, mode 0600; tables in schema.py
    <file>-bells/                     named pipes of waiting threads (wakeup.py)
    <file>-sessions/                  locks that prove who lives (connections/session_files.py)

Each process has one connection that writes, under one lock, and others that read and never wait for
it. A transaction is `BEGIN IMMEDIATE`, so that it never fails for being late. Changes that the
outside is told about are committed with fsync. Claims and heartbeats are not: a power cut that
undoes them ends the workers as well. A later fsync saves all commits before it.

Python gives up its interpreter lock at every step of a statement, and may get it back milliseconds
later, while other processes wait for the transaction. So a transaction is few steps on many rows
(`insert_rows`, json_each), not many small ones.

Limits: one machine; network file systems are refused. The file keeps its greatest size (`VACUUM`
shrinks it). One process writes at a time: more processes run more tasks, but do not commit more.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.connections.server_clock import ServerClock
from machinery_py.connections.sqlite import wakeup
from machinery_py.connections.sqlite.errors import (
    Unavailable,
    busy,
    interrupting,
    is_busy,
    is_full,
    translate,
    unusable,
)
from machinery_py.connections.sqlite.fork_safety import Handles
from machinery_py.connections.sqlite.open import SMALL_LOG, identity, open_reader, open_writer
from machinery_py.errors import BrokerUnavailable, ConfigError
from machinery_py.threads import is_owner

# Seconds between two tries for the write lock; SQLite's own handler sleeps up to 0.1.
RETRY = 0.0002, 0.001
READERS = 8  # idle reading connections kept for the next reader


class SQLiteDriver:
    """The file, opened at the first use. May be used from any thread, and after a fork."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock = SYSTEM_CLOCK,
        synchronous: str = "FULL",
        busy_timeout: float = 5.0,
    ) -> None:
        self.path: str = os.path.abspath(os.fspath(path))
        self.clock: Final = ServerClock(clock)
        if self.clock.is_system:
            self.clock.measure(_machines_moment)
        self.synchronous: str = synchronous.upper()
        if self.synchronous not in ("FULL", "NORMAL"):
            raise ConfigError(
                f"SQLite file {self.path!r}: synchronous is {synchronous!r} (known: FULL, NORMAL)"
            )
        self.busy_timeout = busy_timeout
        self.wakeup_folder: str = self.path + "-bells"
        self.sessions_folder: str = self.path + "-sessions"
        self._handles = Handles()

    def now(self) -> int:
        """Return the time by the clock in microseconds, as the file stores it."""
        return micros(self.clock.now())

    def transaction(self, unavailable: Unavailable = BrokerUnavailable) -> Transaction:
        """Return a transaction for `with … as connection:`. A thread inside it may enter it again.

        Raises:
            BrokerUnavailable (or `unavailable`): others kept the file busy; nothing was done.
            StoreUnusable: the file cannot be worked with. It is PublishRefused as well, or
                PublishUnknown if something may have been done.
        """
        return Transaction(self, True, unavailable)

    def claiming(self, unavailable: Unavailable = BrokerUnavailable) -> Transaction:
        """Return a transaction that a power cut may undo. Inside another one it is part of that."""
        return Transaction(self, False, unavailable)

    def reading(self) -> Reading:
        """Return a connection for `with … as connection:`, for SELECT only.

        It waits for no writer, and sees our own transaction.
        """
        return Reading(self)

    def notify(self, kind: wakeup.Kind, topics: Iterable[str] = (wakeup.ANY,)) -> None:
        """Wake all threads that wait for this kind, in all processes, after the commit."""
        handles = self.here()
        if handles.depth and handles.owner == threading.get_ident():
            handles.told.setdefault(kind, set()).update(topics)
        else:
            wakeup.notify(self.wakeup_folder, {kind: set(topics)})

    def after_commit(self, hook: Callable[[], object]) -> None:
        """Call the hook once the thread's transaction is committed; never if it is rolled back."""
        self.here().hooks.append(hook)

    def notifier(self, kind: wakeup.Kind) -> wakeup.Notifier:
        return wakeup.Notifier(self.wakeup_folder, kind)

    def is_entered(self) -> bool:
        """Return whether this thread is in a transaction, or about to begin one.

        A child is not: the lock that its parent's thread took for the fork is copied as it was.
        """
        handles = self._handles
        return handles.pid == os.getpid() and is_owner(handles.lock)

    def check(self) -> None:
        """Make sure that the file is still the one that was opened.

        Raises:
            StoreUnusable: it was deleted or replaced. The driver does nothing more until it is
                closed.
        """
        handles = self.here()
        with handles.lock:
            if handles.writer is not None:
                self._check(handles)

    def close(self) -> None:
        """Close all connections; the next use opens them again. May be called twice."""
        handles = self.here()
        with handles.lock, handles.readers_lock:
            handles.lost = ""
            handles.close()

    def here(self) -> Handles:
        """Return the handles of this process; a forked child starts with none."""
        handles = self._handles
        if handles.pid != os.getpid():
            handles.keep_for_ever()
            handles = self._handles = Handles()
        return handles

    # Transactions

    def enter(
        self, handles: Handles, durable: bool, unavailable: Unavailable
    ) -> sqlite3.Connection:
        """Called with the lock held."""
        writer = handles.writer
        if handles.depth == 0:
            writer = self._begin(handles, durable, unavailable)
            handles.owner = threading.get_ident()
            handles.failure = None
        handles.depth += 1
        assert writer is not None
        return writer

    def _begin(
        self, handles: Handles, durable: bool, unavailable: Unavailable
    ) -> sqlite3.Connection:
        if handles.writer is None:
            handles.writer = self._open(handles)
        else:
            self._check(handles)
        writer = handles.writer
        deadline = 0.0
        try:
            if handles.durable is not durable:
                if writer.in_transaction:  # executescript() would commit it
                    raise interrupting(self.path, unavailable)
                # Not execute(): SQLite obeys this pragma when it is compiled, and Python would
                # compile it once.
                writer.executescript(
                    f"PRAGMA synchronous = {self.synchronous if durable else 'NORMAL'}"
                )
                handles.durable = durable
            if handles.is_full:
                self._make_room(handles, writer)
            while True:
                try:
                    writer.execute("BEGIN IMMEDIATE")
                    return writer
                except sqlite3.OperationalError as error:
                    if writer.in_transaction:
                        raise interrupting(self.path, unavailable) from None
                    if not is_busy(error):
                        raise
                    now = time.monotonic()
                    deadline = deadline or now + self.busy_timeout
                    if now >= deadline:
                        raise busy(self.path, self.busy_timeout, unavailable) from error
                time.sleep(random.uniform(*RETRY))
        except sqlite3.Error as error:
            raise translate(error, self.path, unavailable=unavailable) from error

    def _make_room(self, handles: Handles, writer: sqlite3.Connection) -> None:
        """Move the log into the file, and cut it, after it has filled the disk.

        It may be many times as large as what is in it. What room there is again is used for that
        first: written to the log, it would be full again before SQLite moves it.
        """
        try:
            is_busy_now, _, _ = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error:  # there is still no room
            return
        writer.execute(f"PRAGMA wal_autocheckpoint = {SMALL_LOG}")  # or it fills the disk again
        handles.is_full = bool(is_busy_now)

    def leave(
        self, handles: Handles, error: BaseException | None, unavailable: Unavailable
    ) -> None:
        """Called with the lock held."""
        handles.depth -= 1
        failure = error or handles.failure
        try:
            if handles.depth:
                handles.failure = failure  # an outer level may catch it; it is not committed
            elif failure is None:
                self._commit(handles, unavailable)
                return
            else:
                self._roll_back(handles)
        finally:
            if not handles.depth:
                handles.owner = 0
                if failure is not None:
                    handles.told.clear()
                    handles.hooks.clear()
        if isinstance(failure, sqlite3.Error):
            handles.is_full = handles.is_full or is_full(failure)
            raise translate(
                failure, self.path, seconds=self.busy_timeout, unavailable=unavailable
            ) from failure
        if error is None and failure is not None and not handles.depth:
            raise failure

    def _commit(self, handles: Handles, unavailable: Unavailable) -> None:
        assert handles.writer is not None
        try:
            handles.writer.execute("COMMIT")
        except sqlite3.Error as error:
            handles.is_full = handles.is_full or is_full(error)
            handles.told.clear()
            handles.hooks.clear()
            self._roll_back(handles)
            raise translate(
                error,
                self.path,
                seconds=self.busy_timeout,
                unavailable=unavailable,
                committing=True,
            ) from error

    def _roll_back(self, handles: Handles) -> None:
        writer = handles.writer
        if writer is None or not writer.in_transaction:
            return  # SQLite rolls back by itself after some errors
        try:
            writer.execute("ROLLBACK")
        except sqlite3.Error:
            handles.writer = None  # the next transaction begins with a new connection
            writer.close()

    # Opening and checking

    def _check(self, handles: Handles) -> None:
        if not handles.lost and identity(self.path) != handles.identity:
            what = "replaced by another one" if os.path.exists(self.path) else "deleted"
            handles.lost = (
                f"it was {what} while it was open (put it back, and start this process again)"
            )
        if handles.lost:
            raise unusable(self.path, handles.lost)

    def _open(self, handles: Handles) -> sqlite3.Connection:
        connection = open_writer(
            self.path, synchronous=self.synchronous, busy_timeout=self.busy_timeout
        )
        handles.durable = True
        handles.identity = identity(self.path)
        return connection

    def borrow(self) -> tuple[Handles, sqlite3.Connection]:
        """Return a reading connection, which the caller gives to `give_back`."""
        handles = self.here()
        if handles.writer is not None:
            self._check(handles)
        reader = handles.lend()
        if reader is not None:
            return handles, reader
        try:
            if handles.writer is None:
                with handles.lock:
                    if handles.writer is None:
                        handles.writer = self._open(handles)
            return handles, open_reader(self.path, busy_timeout=self.busy_timeout)
        except BaseException:
            handles.take_back(None)
            raise

    def give_back(
        self, handles: Handles, reader: sqlite3.Connection, error: BaseException | None
    ) -> None:
        failed = isinstance(error, sqlite3.Error)
        if failed or handles.lost or len(handles.readers) >= READERS:
            reader.close()
            handles.take_back(None)
        else:
            handles.take_back(reader)
        if isinstance(error, sqlite3.Error):
            raise translate(error, self.path, seconds=self.busy_timeout) from error


class Transaction:
    """See SQLiteDriver.transaction."""

    __slots__ = ("_driver", "_durable", "_handles", "_unavailable")

    def __init__(self, driver: SQLiteDriver, durable: bool, unavailable: Unavailable) -> None:
        self._driver = driver
        self._durable = durable
        self._unavailable = unavailable

    def __enter__(self) -> sqlite3.Connection:
        self._handles = handles = self._driver.here()
        handles.lock.acquire()
        try:
            return self._driver.enter(handles, self._durable, self._unavailable)
        except BaseException:
            handles.lock.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handles = self._handles
        if handles.pid != os.getpid():
            return  # forked inside of it: the transaction is the parent's
        told: dict[str, set[str]] = {}
        hooks: list[Callable[[], object]] = []
        try:
            self._driver.leave(handles, error, self._unavailable)
            if not handles.depth:
                told, handles.told = handles.told, told
                hooks, handles.hooks = handles.hooks, hooks
        finally:
            handles.lock.release()
        if told:
            wakeup.notify(self._driver.wakeup_folder, told)
        for hook in hooks:
            hook()


class Reading:
    """See SQLiteDriver.reading."""

    __slots__ = ("_driver", "_lent")

    def __init__(self, driver: SQLiteDriver) -> None:
        self._driver = driver

    def __enter__(self) -> sqlite3.Connection:
        handles = self._driver.here()
        if handles.depth and handles.owner == threading.get_ident() and handles.writer is not None:
            self._lent = None
            return handles.writer
        self._lent = lent = self._driver.borrow()
        return lent[1]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._lent is not None:
            self._driver.give_back(*self._lent, error)


def _machines_moment() -> dt.datetime:
    """Return the moment by the machine: processes whose SystemClock was shifted agree on it."""
    return dt.datetime.fromtimestamp(time.time(), dt.UTC)
