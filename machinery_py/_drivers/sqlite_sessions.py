"""Which consumers live: each locks a file of its own, and the lock goes with its process, however that ends.

    <folder>/<key>    its owner holds an exclusive POSIX record lock on it; what is in it, see sqlite_runs.py

A record lock belongs to a process: forked children do not have it. But closing *any* descriptor of the file in the
owning process drops it, so a process never opens the files of its own sessions; it knows those by heart.

Limits: without record locks (Windows), or when somebody deleted the file, nobody can be asked: then only beats count.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Collection
from enum import Enum

from machinery_py._drivers.sqlite_runs import RunTable, read

FORGOTTEN = 60.0  # seconds after which a file that belongs to no session is removed, if nobody holds it

#: key → descriptor, of all drivers of this process; -1 where there are no locks. One step of a dict is atomic.
_own: dict[str, int] = {}

if sys.platform == "win32":
    HAS_LOCKS = False

    def _lock(descriptor: int) -> bool:
        return False

else:
    import fcntl

    HAS_LOCKS = True

    def _lock(descriptor: int) -> bool:
        """Take the lock if nobody has it."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class Life(Enum):
    """What the file of a session says."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def begin(folder: str) -> str:
    """Start to live under a new key."""
    key = secrets.token_hex(12)
    descriptor = -1
    if HAS_LOCKS:
        try:
            _make(folder)
            descriptor = os.open(os.path.join(folder, key), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            pass  # no proof of life then: the beats must do
        else:
            if not _lock(descriptor):  # a file system without locks: a file would say that we are dead
                os.close(descriptor)
                descriptor = -1
                _remove(folder, key)
    _own[key] = descriptor
    return key


def _make(folder: str) -> None:
    # The folder alone: one that is missing above it would hide that the file's place is wrong.
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass


def run_table(key: str) -> RunTable | None:
    """Where the owner of the key notes what it runs; None where there is no file."""
    descriptor = _own.get(key, -1)
    if descriptor < 0:
        return None
    try:
        return RunTable(descriptor)
    except OSError:
        return None  # a full disk: then all that is held is blamed


def ran(folder: str, key: str) -> list[int] | None:
    """The ids of what a session runs, or ran when it died. None: that cannot be known. Not for sessions of our own."""
    return None if key in _own else read(os.path.join(folder, key))


def end(folder: str, key: str) -> None:
    """Live no more. May be called twice."""
    _remove(folder, key)
    abandon(key)


def abandon(key: str) -> None:
    """Let go of the lock and leave the file, as a process does that dies."""
    descriptor = _own.pop(key, -1)
    if descriptor >= 0:
        os.close(descriptor)


def is_own(key: str) -> bool:
    return key in _own


def look(folder: str, key: str) -> Life:
    """Whether the owner of the key lives."""
    if key in _own:
        return Life.ALIVE
    if not HAS_LOCKS:
        return Life.UNKNOWN
    try:
        descriptor = os.open(os.path.join(folder, key), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return Life.UNKNOWN
    try:
        return Life.DEAD if _lock(descriptor) else Life.ALIVE
    finally:
        os.close(descriptor)


def bury(folder: str, key: str) -> None:
    """Remove the file of a session that was found dead."""
    _remove(folder, key)


def sweep(folder: str, known: Collection[str]) -> None:
    """Remove the files of processes that died before their session was written down, or after it was given up."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name not in known and name not in _own:
            try:
                old = time.time() - os.stat(os.path.join(folder, name)).st_mtime > FORGOTTEN
            except OSError:
                continue
            if old and look(folder, name) is Life.DEAD:
                _remove(folder, name)


def _remove(folder: str, key: str) -> None:
    try:
        os.unlink(os.path.join(folder, key))
    except OSError:
        pass


def is_stopped(pid: int) -> bool:
    """Whether the process is suspended (SIGSTOP, a debugger)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _forget_parent() -> None:
    """In a forked child: the sessions are the parent's, and may be asked for like any other's."""
    for descriptor in _own.values():
        if descriptor >= 0:
            os.close(descriptor)
    _own.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
