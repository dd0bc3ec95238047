"""What one process has open of a SQLite file, and what becomes of it when the process forks.

SQLite knows the locks of a process by the files that it has open. If a child inherited open ones, its own connections
would rely on locks that only the parent has, and the log could be deleted under them. So all is closed before a fork.

Limits: forks that Python does not see (by a C library) are noticed by the process id, and the inherited connections are
left alone; such a child must not outlive its parent.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

FORK_PATIENCE = 30.0  # seconds that a fork waits for what other threads are reading just now


@dataclass(slots=True, eq=False, weakref_slot=True)
class Handles:
    """`lock` guards all but the readers; `gate` those, and may be taken inside of `lock`.

    Attributes:
        identity: device and inode of the file that was opened.
        durable: whether the writer waits for the disk just now.
        depth, owner: how often, and by which thread, the transaction that is going on was entered.
        failure: what went wrong in an inner part of it.
        kinds, hooks: what to ring and to call once it is committed.
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
    failure: BaseException | None = None
    kinds: set[str] = field(default_factory=set)
    hooks: list[Callable[[], object]] = field(default_factory=list)
    lost: str = ""
    gate: threading.Condition = field(default_factory=lambda: threading.Condition(threading.Lock()))
    readers: list[sqlite3.Connection] = field(default_factory=list)
    lent: int = 0
    forking: bool = False

    def __post_init__(self) -> None:
        _all.add(self)

    def close(self) -> None:
        """Close all that is not in use. Called with the lock and the gate held."""
        while self.readers:
            self.readers.pop().close()
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()

    def lend(self) -> sqlite3.Connection | None:
        """A reader that is not in use, or None: then open one. Followed by `take_back`, in any case."""
        with self.gate:
            while self.forking:
                self.gate.wait()
            self.lent += 1
            return self.readers.pop() if self.readers else None

    def take_back(self, reader: sqlite3.Connection | None) -> None:
        """A reader is not in use any more; None: it was closed, or never opened."""
        with self.gate:
            self.lent -= 1
            if reader is not None:
                self.readers.append(reader)
            if self.forking:
                self.gate.notify_all()

    def before_fork(self) -> None:
        """Close everything, and let nobody open anything."""
        with self.gate:
            self.forking = True
            self.gate.wait_for(lambda: not self.lent, FORK_PATIENCE)
        self.lock.acquire()
        if not self.depth:  # else this very thread is in a transaction
            with self.gate:
                self.close()

    def after_fork(self) -> None:
        """In the parent: go on."""
        with self.gate:
            self.forking = False
            self.gate.notify_all()
        self.lock.release()

    def keep_for_ever(self) -> None:
        """In a child: never close what was the parent's, not even as garbage; that could harm its file."""
        _inherited.append(self)


class _Fork:
    """One fork at a time."""

    lock = threading.Lock()
    held: tuple[Handles, ...] = ()


_all: weakref.WeakSet[Handles] = weakref.WeakSet()
_inherited: list[Handles] = []


def _before_fork() -> None:
    _Fork.lock.acquire()
    _Fork.held = tuple(_all)
    for handles in _Fork.held:
        handles.before_fork()


def _after_fork() -> None:
    for handles in _Fork.held:
        handles.after_fork()
    _Fork.held = ()
    _Fork.lock.release()


def _after_fork_in_child() -> None:
    for handles in _Fork.held:
        if handles.writer is not None or handles.lent:
            handles.keep_for_ever()
        _all.discard(handles)
    _Fork.held = ()
    _Fork.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
