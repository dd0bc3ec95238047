"""SQLite's exceptions in our words. None of them leaves the stores."""

from __future__ import annotations

import errno
import os
import sqlite3

from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
    for_good,
)

Unavailable = type[BrokerUnavailable] | type[BackendUnavailable]

_BUSY, _LOCKED = 5, 6  # primary result codes, see https://sqlite.org/rescode.html
_READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _TOOBIG, _NOTADB = 8, 10, 11, 13, 14, 18, 26

_TEXTS = {
    _READONLY: "it is read-only (give this user the right to write the file and its folder)",
    _IOERR: "the disk does not work (see the system's log)",
    _CORRUPT: "it is damaged (restore it, or save what is left with: sqlite3 FILE .recover)",
    _FULL: "no space is left on the disk (free some; nothing is lost)",
    _CANTOPEN: (
        "it cannot be opened (has this user the right to read and write the file and its folder?)"
    ),
    _NOTADB: "it is no SQLite database (name another file, or move this one away)",
}


class FileUnusable(StoreUnusable, PublishRefused):
    """The file cannot be used; nothing was written."""


class CommitUnknown(StoreUnusable, PublishUnknown):
    """A disk failure during a commit: after a power cut, the commit may turn out to stand."""


def code_of(error: sqlite3.Error) -> int:
    """Return the primary result code, 0 if the error is not SQLite's own."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    return code_of(error) in (_BUSY, _LOCKED)


def is_full(error: sqlite3.Error) -> bool:
    return code_of(error) == _FULL


def unusable(path: str, text: str) -> FileUnusable:
    return FileUnusable(f"SQLite file {path!r}: {text}")


def busy(path: str, seconds: float, unavailable: Unavailable, *, why: str = "") -> MachineryError:
    return unavailable(
        f"SQLite file {path!r}: another process has been writing for {seconds:g} s "
        f"({why or 'is one stopped in the middle? see busy_timeout'})"
    )


def interrupting(path: str, unavailable: Unavailable) -> MachineryError:
    """Return the error for a call on top of another one of its thread, which has the writer."""
    return unavailable(
        f"SQLite file {path!r}: this thread is in a transaction of it (a finaliser or signal "
        "handler interrupts it: make the call from a thread, or later)"
    )


def translate(
    error: sqlite3.Error,
    path: str,
    *,
    seconds: float = 0.0,
    unavailable: Unavailable = BrokerUnavailable,
    committing: bool = False,
) -> MachineryError:
    """Return our error for one of SQLite. `committing`: COMMIT itself raised it."""
    code = code_of(error)
    if code in (_BUSY, _LOCKED):
        return busy(path, seconds, unavailable)
    if code == _TOOBIG:
        return for_good(PublishRefused(f"SQLite file {path!r}: a value is too big ({error})"))
    text = _TEXTS.get(code, "SQLite failed")
    if code == _IOERR and committing:
        return CommitUnknown(f"SQLite file {path!r}: {text}: {error}")
    return unusable(path, f"{text}: {error}")


def refuse_open(error: OSError, path: str) -> FileUnusable:
    """Return the error that says why a file could not be created."""
    folder = os.path.dirname(path)
    if error.errno == errno.ENOENT:
        return unusable(path, f"folder {folder!r} does not exist (create it, or name another file)")
    if error.errno in (errno.EACCES, errno.EPERM):
        return unusable(
            path, f"folder {folder!r}: {error.strerror} (give this user the right to write there)"
        )
    if error.errno == errno.EROFS:
        return unusable(path, f"folder {folder!r} is on a read-only disk (name another file)")
    if error.errno == errno.ENOSPC:
        return unusable(path, _TEXTS[_FULL])
    return unusable(path, f"it cannot be made: {error.strerror}")
