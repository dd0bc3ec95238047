"""Live consumers of this host, and what they run: each has a file of its own, and holds a lock on it while it lives.

    <folder>/<key>    its owner holds an exclusive POSIX record lock on it; what is in it, see run_table.py

The folder lies beside a SQLite file; consumers of a server have one of this user and host. The lock goes with the process,
however that ends. A record lock belongs to a process: forked children do not have it. But closing *any* descriptor of the file
in the owning process drops it, so a process never opens the files of its own sessions; it knows those by heart.

Limits: without record locks (Windows), or when somebody deleted the file, nobody can be asked: then beats prove life, and of a
dead consumer it is not known what it ran.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Collection
from enum import Enum

from machinery_py.connections.run_table import RunTable, read

FORGOTTEN = (
    60.0  # seconds after which a file that belongs to no session is removed, if nobody holds it
)
LEFT = 3600.0  # the same, where nobody here can ask which sessions there are: so long somebody may want to know what ran

#: key → descriptor, of all drivers of this process; -1 where there are no locks. One step of a dict is atomic.
_own: dict[str, int] = {}
_tables: dict[str, RunTable] = {}

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


class SessionState(Enum):
    """State of a session, from its file."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class SessionFile:
    """A consumer's own file, under a new key. May be used from any thread.

    Args:
        folder: "" where none can be trusted: then there is a key and no file.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.key = secrets.token_hex(12)
        _own[self.key] = _new_file(folder, self.key) if folder and HAS_LOCKS else -1
        self._table = _table(self.key)
        self.notes_runs = self._table is not None

    def begins(self, id: int) -> None:
        """The delivery with this number is being run."""
        if self._table is not None:
            self._table.begins(id)

    def ends(self, id: int) -> None:
        if self._table is not None:
            self._table.ends(id)

    def touch(self) -> None:
        """Show that it is no old file."""
        if _own.get(self.key, -1) >= 0:
            try:
                os.utime(os.path.join(self.folder, self.key))
            except OSError:
                pass  # somebody removed it: then nobody will know what ran

    def end(self) -> None:
        """Live no more. May be called twice."""
        _remove(self.folder, self.key)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the lock and leave the file, as a process does that dies."""
        _tables.pop(self.key, None)
        descriptor = _own.pop(self.key, -1)
        if descriptor >= 0:
            os.close(descriptor)


def _new_file(folder: str, key: str) -> int:
    """Make a session's file, and return its locked descriptor; -1 if that cannot be had."""
    try:
        _make(folder)
        descriptor = os.open(
            os.path.join(folder, key), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
    except OSError:
        return -1  # no proof of life then: the beats must do
    if _lock(descriptor):
        return descriptor
    os.close(descriptor)  # a file system without locks: a file would say that we are dead
    _remove(folder, key)
    return -1


def _table(key: str) -> RunTable | None:
    descriptor = _own[key]
    if descriptor < 0:
        return None
    try:
        table = RunTable(descriptor)
    except OSError:
        return None  # a full disk
    _tables[key] = table
    return table


def host_file(kind: str) -> SessionFile:
    """The file of a new consumer of a server of this kind. It is to be touched more often than each hour."""
    folder = host_folder(kind)
    sweep(folder, (), forgotten=LEFT)
    return SessionFile(folder)


def host_folder(kind: str) -> str:
    """The folder for consumers of a server of this kind: of this user, on this host. "" if there is none that is his alone."""
    if not HAS_LOCKS:
        return ""
    try:
        folder = os.path.join(tempfile.gettempdir(), f"machinery-{os.getuid()}-{kind}")
        _make(folder)
        found = os.lstat(folder)
    except OSError:
        return ""
    # Who else could write there could blame our tasks, and who made a link of it chose where we write.
    is_ours = (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    )
    return folder if is_ours else ""


def _make(folder: str) -> None:
    # The folder alone: one that is missing above it would hide that the file's place is wrong.
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass


def ran(folder: str, key: str) -> set[int] | None:
    """Return what a session runs, or ran when it died. None: that cannot be known."""
    if key in _own:
        table = _tables.get(key)
        return None if table is None else table.running()
    return read(os.path.join(folder, key)) if folder else None


def ran_by_the_dead(folder: str) -> set[int]:
    """Return what all dead sessions ran that have a file."""
    found: set[int] = set()
    for name in _names(folder):
        if look(folder, name) is SessionState.DEAD:
            found |= read(os.path.join(folder, name)) or set()
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder) if folder else []
    except OSError:
        return []


def is_own(key: str) -> bool:
    return key in _own


def look(folder: str, key: str) -> SessionState:
    """Whether the owner of the key lives."""
    if key in _own:
        return SessionState.ALIVE
    if not HAS_LOCKS:
        return SessionState.UNKNOWN
    try:
        descriptor = os.open(os.path.join(folder, key), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return SessionState.UNKNOWN
    try:
        return SessionState.DEAD if _lock(descriptor) else SessionState.ALIVE
    finally:
        os.close(descriptor)


def bury(folder: str, key: str) -> None:
    """Remove the file of a session that was found dead."""
    _remove(folder, key)


def sweep(folder: str, known: Collection[str], *, forgotten: float = FORGOTTEN) -> None:
    """Remove the files of processes that died before their session was written down, or after it was given up.

    Args:
        forgotten: seconds since such a file was touched.
    """
    for name in _names(folder):
        if name not in known and name not in _own:
            try:
                old = time.time() - os.stat(os.path.join(folder, name)).st_mtime > forgotten
            except OSError:
                continue
            if old and look(folder, name) is SessionState.DEAD:
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
    _tables.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
