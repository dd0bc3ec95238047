"""Open connections of a process to a SQLite file, and how they survive a fork.

SQLite knows the locks of a process by the files that it has open. If a child inherited open files,
its own connections would rely on locks that only the parent has, and the log could be deleted under
them. So all files are closed before a fork.

The SQLite library has locks of its own, for all connections of a process. If a child is forked
while another thread holds one, the child's first call waits for ever. So no thread is in the
library during a fork, not even to free a connection that was dropped without `close`: that is done
when nobody forks.

Limits: forks that Python does not see (by a C library) are noticed by the process id. The child
then leaves the inherited connections alone, and must not outlive its parent. Other users of SQLite
in the process are not known here: a program whose threads use it by themselves must not fork
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from machinery_py.connections.forks import FORK_PATIENCE, at_fork


@dataclass(slots=True, eq=False, weakref_slot=True)
class Handles:
    """The open connections of a process to the file.

    `lock` guards all but the readers; `readers_lock` guards those, and may be taken inside `lock`.

    Attributes:
        identity: device and inode of the file that was opened.
        durable: whether the writer waits for the disk just now.
        depth, owner: how often, and by which thread, the transaction that is going on was entered.
        is_full: the disk was full, and the log was not cut since.
        failure: what went wrong in an inner part of it.
        told, hooks: what to tell whom (wakeup.py) and what to call once it is committed.
        lost: why the file must not be used any more.
        lent: how many readers are in use. None is given out while `forking`.
    """

    pid: int = field(default_factory=os.getpid)
    lock: threading.RLock = field(default_factory=threading.RLock)
    writer: sqlite3.Connection | None = None
    identity: tuple[int, int] | None = None
    durable: bool = True
    depth: int = 0
    owner: int = 0
    is_full: bool = False
    failure: BaseException | None = None
    told: dict[str, set[str]] = field(default_factory=dict)
    hooks: list[Callable[[], object]] = field(default_factory=list)
    lost: str = ""
    readers_lock: threading.Condition = field(
        default_factory=lambda: threading.Condition(threading.Lock())
    )
    readers: list[sqlite3.Connection] = field(default_factory=list)
    lent: int = 0
    forking: bool = False

    def __post_init__(self) -> None:
        # Who opens a file now must not do it beside a fork.
        free = _ForkTurn.lock.acquire(timeout=FORK_PATIENCE)
        try:
            _all.add(self)
        finally:
            if free:
                _ForkTurn.lock.release()
        _close_dropped()

    def __del__(self) -> None:
        """May run anywhere, also in the middle of a fork: it waits for nothing."""
        connections = [*self.readers, *([self.writer] if self.writer is not None else [])]
        if self.pid == os.getpid():
            _dropped.extend(connections)
            _close_dropped()
        else:
            _inherited.extend(connections)

    def close(self) -> None:
        """Close all that is not in use. Called with the lock and the readers_lock held."""
        while self.readers:
            self.readers.pop().close()
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()

    def lend(self) -> sqlite3.Connection | None:
        """Return an idle reader, or None: then the caller opens one. `take_back` must follow."""
        with self.readers_lock:
            while self.forking:
                self.readers_lock.wait()
            self.lent += 1
            return self.readers.pop() if self.readers else None

    def take_back(self, reader: sqlite3.Connection | None) -> None:
        """Take back a reader; None: it was closed, or never opened."""
        with self.readers_lock:
            self.lent -= 1
            if reader is not None:
                self.readers.append(reader)
            if self.forking:
                self.readers_lock.notify_all()

    def before_fork(self) -> None:
        """Close all connections, and block new ones."""
        with self.readers_lock:
            self.forking = True
            self.readers_lock.wait_for(lambda: not self.lent, FORK_PATIENCE)
        self.lock.acquire()
        if not self.depth:  # else this very thread is in a transaction
            with self.readers_lock:
                self.close()

    def after_fork(self) -> None:
        """Let connections be opened again, in the parent."""
        with self.readers_lock:
            self.forking = False
            self.readers_lock.notify_all()
        self.lock.release()

    def keep_for_ever(self) -> None:
        """Keep the parent's connections in a child: closing or freeing them could harm the file."""
        _inherited.append(self)


class _ForkTurn:
    """Lock of all forks: one at a time, and none while dropped connections are closed."""

    lock = threading.Lock()
    held: tuple[Handles, ...] = ()


_all: weakref.WeakSet[Handles] = weakref.WeakSet()
_inherited: list[Handles | sqlite3.Connection] = []
_dropped: deque[sqlite3.Connection] = deque()


def _close_dropped() -> None:
    """Close dropped connections; a fork or close in progress does it when it ends."""
    while _dropped and _ForkTurn.lock.acquire(blocking=False):
        try:
            with contextlib.suppress(IndexError, sqlite3.Error):
                while True:
                    _dropped.popleft().close()
        finally:
            _ForkTurn.lock.release()


def _before_fork() -> None:
    _ForkTurn.lock.acquire()
    _ForkTurn.held = tuple(_all)
    for handles in _ForkTurn.held:
        handles.before_fork()


def _after_fork() -> None:
    for handles in _ForkTurn.held:
        handles.after_fork()
    _ForkTurn.held = ()
    _ForkTurn.lock.release()
    _close_dropped()


def _after_fork_in_child() -> None:
    for handles in _ForkTurn.held:
        if handles.writer is not None or handles.lent:
            handles.keep_for_ever()
        _all.discard(handles)
    _ForkTurn.held = ()
    _inherited.extend(_dropped)
    _dropped.clear()
    _ForkTurn.lock = threading.Lock()


at_fork(_before_fork, _after_fork, _after_fork_in_child)
