"""Files of the live consumers of this host: proof that the owner lives, and which tasks it runs.

    <folder>/<key>    locked by its owner (exclusive POSIX record lock) while that lives
                      SLOTS entries: a Run of each delivery whose task runs, its number and then
                      its series, 8 bytes each; the series of a free slot is 0

The folder lies beside a SQLite file; consumers of a server have one folder per user and host. The
operating system drops the lock when the process ends in any way. A record lock belongs to a
process: forked children do not have it. Closing *any* descriptor of the file in the owning process
drops it too, so a process never opens the files of its own sessions.

The file is mapped: a note costs no system call, and survives a kill. Whoever gives the consumer up
reads the file, and blames these deliveries alone. Deliveries beyond SLOTS are not noted, nor
blamed.

A file of another size is that of another version of this library: what its owner ran is unknown.

Limits: without record locks (Windows), or when somebody deleted the file, heartbeats prove life,
and it is not known what a dead consumer ran.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Collection
from enum import Enum

SLOTS = 4096
#: Seconds after which a file that belongs to no session is removed, if nobody holds it.
FORGOTTEN = 60.0
#: The same in a host's folder: within this time a worker may give the session up, and ask what ran.
FORGOTTEN_ON_HOST = 3600.0

#: Series of the numbers of a store that numbers all its messages alike.
ALL = 2**64 - 1

_run = struct.Struct("=QQ")
_SIZE = SLOTS * _run.size


Run = tuple[int, int]
"""A delivery in its consumer's file: its number, and the series in which it has that number.

Both are unsigned, and have 64 bits each; the series is not 0.
"""


#: key → file, of all drivers of this process.
_own: dict[str, SessionFile] = {}

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
        self.key: str = secrets.token_hex(12)
        self.descriptor: int = -1
        self._map: memoryview[int] | None = None
        self._free = list(range(SLOTS - 1, -1, -1))
        self._slots: dict[Run, int] = {}
        self._again: list[Run] = []  # noted already, by a twin of the message that runs beside it
        # First: a thread that looked at the file as a stranger would end this process's lock on it.
        _own[self.key] = self
        if folder and HAS_LOCKS:
            self.descriptor = _new_file(folder, self.key)
        if self.descriptor >= 0:
            self._map = _mapped(self.descriptor)

    @property
    def notes_runs(self) -> bool:
        """Return whether other processes can read what it runs."""
        return self._map is not None

    def begins(self, run: Run) -> None:
        """Note that this delivery is being run."""
        slots = self._map
        if slots is None:
            return
        if run in self._slots:
            self._again.append(run)
            return
        try:
            slot = self._free.pop()
        except IndexError:
            return
        self._slots[run] = slot
        # The series last: a process that is killed in between leaves a free slot.
        slots[2 * slot], slots[2 * slot + 1] = run

    def ends(self, run: Run) -> None:
        """Note that this delivery is run no more."""
        if self._again and run in self._again:
            self._again.remove(run)
            return
        slot, slots = self._slots.pop(run, None), self._map
        if slot is not None and slots is not None:
            slots[2 * slot + 1] = 0
            self._free.append(slot)

    def running(self) -> set[Run] | None:
        """Return what it runs; None if it notes nothing."""
        return set(self._slots) if self._map is not None else None

    def touch(self) -> None:
        """Keep the file from looking old, for `sweep`."""
        if self.descriptor >= 0 and self.key in _own:
            try:
                os.utime(os.path.join(self.folder, self.key))
            except OSError:
                pass  # somebody removed it: then nobody will know what ran

    def end(self) -> None:
        """Remove the file. May be called twice."""
        remove(self.folder, self.key)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the lock and leave the file, as a process does that dies."""
        if _own.pop(self.key, None) is not None and self.descriptor >= 0:
            self._map = None  # it has a descriptor of its own
            os.close(self.descriptor)


def _new_file(folder: str, key: str) -> int:
    """Make a session's file, and return its locked descriptor; -1 if that cannot be had."""
    try:
        _make(folder)
        descriptor = os.open(
            os.path.join(folder, key), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
    except OSError:
        return -1  # no proof of life then: the heartbeats must do
    if _lock(descriptor):
        return descriptor
    os.close(descriptor)  # a file system without locks: a file would say that we are dead
    remove(folder, key)
    return -1


def _mapped(descriptor: int) -> memoryview[int] | None:
    """Return the slots of a new file; None if the disk is full: then it proves life alone."""
    try:
        # Written, not only made longer: on a full disk the first note would kill the process.
        os.write(descriptor, bytes(_SIZE))
        return memoryview(mmap.mmap(descriptor, _SIZE)).cast("Q")
    except OSError:
        return None


def host_file(kind: str) -> SessionFile:
    """Return the file of a new consumer of such a server.

    The consumer must `touch` it every few minutes.
    """
    folder = host_folder(kind)
    sweep(folder, (), forgotten=FORGOTTEN_ON_HOST)
    return SessionFile(folder)


def host_folder(kind: str) -> str:
    """Return this user's folder for consumers of such a server; "" if others could write there."""
    if not HAS_LOCKS:
        return ""
    try:
        folder = os.path.join(tempfile.gettempdir(), f"machinery-{os.getuid()}-{kind}")
        _make(folder)
    except OSError:
        return ""
    # Another user who can write there could blame our tasks; a link could redirect our writes.
    return folder if is_private(folder) else ""


def is_private(folder: str) -> bool:
    """Return whether the folder is there, is no link, and is this user's alone."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    ours = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    return stat.S_ISDIR(found.st_mode) and ours


def _make(folder: str) -> None:
    # The folder alone: one that is missing above it would hide that the file's place is wrong.
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass


def ran(folder: str, key: str) -> set[Run] | None:
    """Return what a session runs, or ran when it died. None: that cannot be known."""
    own = _own.get(key)
    if own is not None:
        return own.running()
    return _read(folder, key) if folder else None


def ran_by_the_dead(folder: str) -> set[Run]:
    """Return what all dead sessions ran that have a file."""
    found: set[Run] = set()
    for key in _keys(folder):
        if look(folder, key) is SessionState.DEAD:
            found |= _read(folder, key) or set()
    return found


def _read(folder: str, key: str) -> set[Run] | None:
    try:
        with open(os.path.join(folder, key), "rb") as file:
            content = file.read(_SIZE + 1)
    except OSError:
        return None
    if len(content) != _SIZE:
        return None
    return {(number, series) for number, series in _run.iter_unpack(content) if series}


def _keys(folder: str) -> list[str]:
    try:
        return os.listdir(folder) if folder else []
    except OSError:
        return []


def is_own(key: str) -> bool:
    """Return whether the session is of this process."""
    return key in _own


def look(folder: str, key: str) -> SessionState:
    """Find out whether the owner of the key lives."""
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


def sweep(folder: str, known: Collection[str], *, forgotten: float = FORGOTTEN) -> None:
    """Remove files of dead processes whose session was never registered, or is given up.

    Args:
        known: the keys of registered sessions, whose files stay.
        forgotten: seconds since such a file was touched.
    """
    for key in _keys(folder):
        if key not in known and key not in _own:
            try:
                old = time.time() - os.stat(os.path.join(folder, key)).st_mtime > forgotten
            except OSError:
                continue
            if old and look(folder, key) is SessionState.DEAD:
                remove(folder, key)


def remove(folder: str, key: str) -> None:
    """Remove a session's file, if it is there."""
    try:
        os.unlink(os.path.join(folder, key))
    except OSError:
        pass


def _forget_parent() -> None:
    """In a forked child: the sessions are the parent's, and may be asked for like any other's."""
    for file in _own.values():
        if file.descriptor >= 0:
            os.close(file.descriptor)
    _own.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
