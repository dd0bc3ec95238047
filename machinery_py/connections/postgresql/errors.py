"""PostgreSQL's exceptions in our words. None of them leaves the stores."""

from __future__ import annotations

import psycopg

from machinery_py.config.urls import redact, without_secrets
from machinery_py.connections.plain_words import plain
from machinery_py.errors import (
    MachineryError,
    PublishRefused,
    StoreUnusable,
    for_good,
)

# SQLSTATEs: https://www.postgresql.org/docs/current/errcodes-appendix.html
RACED = frozenset({"MP001", "40001", "40P01"})  # ours, serialization failure, deadlock
ENDED = frozenset({"57P01", "57P02", "57P03"})  # the server, or an administrator, ends connections
OVERSTAYED = frozenset({"25P03", "25P04"})  # a transaction that was idle, or open, for too long
MISSING = frozenset({"3F000", "42P01", "42883"})  # no such schema, table, function
READ_ONLY = "25006"
FULL = "53100"
LOCKED = "55P03"
FAILED_BEFORE = "25P02"  # the user's transaction, and it takes no more
_OF_OTHERS = frozenset({"42P05", "26000"})  # such a prepared statement is there, or is not there
_TOO_BIG = frozenset({"54000", "22001"})
_OF_NOTIFY = "async.c"  # also 54000: the queue of notifications is full, until they are read

# SQLSTATE, or its class → what to do.
_UNUSABLE = {
    READ_ONLY: "it accepts no writes (is it a replica? name all hosts in the URL)",
    "42501": "this role has not the right (see: PostgreSQL schema, roles, in the documentation)",
    "28": "it refuses this user (check user, password and pg_hba.conf)",
    "3D": "there is no such database (create it, or correct the URL)",
    "XX001": "it is damaged",
    "XX002": "it is damaged",
}
_AUTHENTICATION = ("authentication failed", "no password supplied", "no pg_hba.conf entry")


def is_raced(error: BaseException) -> bool:
    """Return whether the call did nothing, and may be made again at once."""
    return isinstance(error, psycopg.Error) and error.sqlstate in RACED


def is_unknown(error: BaseException) -> bool:
    """Return whether the call may have been carried out although it failed: no reply came."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return state is None or state[:2] == "08" or state == "57P02"


def is_pooled(error: BaseException) -> bool:
    """Return whether the call did nothing, since its connection is shared with strangers."""
    return isinstance(error, psycopg.Error) and error.sqlstate in _OF_OTHERS


def is_harmless(error: BaseException) -> bool:
    """Return whether the connection can be used again: the statement alone failed."""
    state = (error.sqlstate if isinstance(error, psycopg.Error) else None) or "08"
    # After a promotion another host takes the writes: the next connection looks for it.
    return not (state[:2] in ("08", "53", "57", "58", "XX") or state in (READ_ONLY, *_OF_OTHERS))


def _is_of_notify(error: BaseException) -> bool:
    return isinstance(error, psycopg.Error) and error.diag.source_file == _OF_NOTIFY


def translate(
    error: BaseException, url: str, *, doing: str, away: type[MachineryError]
) -> MachineryError:
    """Return our error: `away` if the trouble will pass."""
    state = (error.sqlstate if isinstance(error, psycopg.Error) else None) or ""
    # Without the statements of functions.sql that it was raised in.
    said = str(error).partition("\nCONTEXT:")[0]
    text = " ".join(without_secrets(said, url).split())
    at = f"PostgreSQL at {redact(url)}: {doing}"
    if state in _TOO_BIG and not _is_of_notify(error):
        return for_good(PublishRefused(f"{at}: a value is too big: {text}"))
    reason = _UNUSABLE.get(state) or _UNUSABLE.get(state[:2])
    if not state and any(words in text for words in _AUTHENTICATION):
        reason = _UNUSABLE["28"]
    if not state and "does not exist" in text:
        reason = _UNUSABLE["28" if 'role "' in text else "3D"]
    if reason is not None:
        return StoreUnusable(f"{at}: {reason}: {text}")
    unusable = (psycopg.ProgrammingError, psycopg.DataError, psycopg.InternalError)
    if isinstance(error, unusable) and state != FAILED_BEFORE:
        return StoreUnusable(f"{at}: {text}")
    if state == FULL:
        text = f"no space is left on its disk (free some; nothing is lost): {text}"
    trouble = away(f"{at}: {plain(text) if not state else text}")
    trouble.blocked = state == LOCKED
    return trouble
