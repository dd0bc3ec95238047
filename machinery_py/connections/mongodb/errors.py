"""Errors of MongoDB and its client library, as ours.

After a refusal nothing was written. After a lost reply nobody knows: the caller says whether the
step may be repeated.
"""

from __future__ import annotations

from typing import Any

from bson.errors import BSONError
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DocumentTooLarge,
    InvalidURI,
    NotPrimaryError,
    OperationFailure,
    ServerSelectionTimeoutError,
    WTimeoutError,
)

from machinery_py.config.urls import redact, without_secrets
from machinery_py.connections.plain_words import plain
from machinery_py.errors import MachineryError, PublishRefused, StoreUnusable, for_good

DUPLICATE = 11000  # a document with this _id is there

# Codes of the server: https://github.com/mongodb/mongo/blob/master/src/mongo/base/error_codes.yml
_FATAL = frozenset({13, 18, 20, 31, 59, 73, 115, 8000})  # rights, password, version, names
_FULL = frozenset({14031, 12501})  # OutOfDiskSpace, QuotaExceeded
_TOO_BIG = frozenset({10334, 17280, 17419, 17420})
# The server is going down, or was a primary: it may have been carried out.
_INTERRUPTED = frozenset({91, 11600, 11602})
_NOT_PRIMARY = frozenset({10107, 10058, 13435, 13436, 189})  # refused before anything was done
# CursorNotFound, QueryPlanKilled, CursorKilled: what is read is read anew.
_CURSOR_LOST = frozenset({43, 175, 237})


def is_unknown(error: BaseException) -> bool:
    """Return whether the step may have been carried out although it failed."""
    if isinstance(error, ServerSelectionTimeoutError):
        return False
    if isinstance(error, NotPrimaryError):
        return _code(error) not in _NOT_PRIMARY
    if isinstance(error, BulkWriteError):
        return True  # some of it was
    if isinstance(error, OperationFailure):
        return isinstance(error, WTimeoutError) or error.code in _INTERRUPTED
    return isinstance(error, ConnectionFailure)


def may_be_repeated(error: BaseException) -> bool:
    """Return whether a repeat may succeed: connection or cursor are lost, or the primary is new."""
    if isinstance(error, ServerSelectionTimeoutError):
        return False
    return isinstance(error, AutoReconnect) or (
        isinstance(error, OperationFailure)
        and error.code in _INTERRUPTED | _NOT_PRIMARY | _CURSOR_LOST
    )


def is_ours_to_sort(error: BaseException) -> bool:
    """Return whether it is the client library's, and no error of this program."""
    return isinstance(
        error,
        ConnectionFailure
        | OperationFailure
        | ConfigurationError
        | InvalidURI
        | BSONError
        | OSError
        | DocumentTooLarge,
    )


def as_ours(
    error: Exception,
    *,
    url: str,
    doing: str,
    away: type[MachineryError],
    refused: type[MachineryError],
) -> MachineryError:
    """Return our error: `away` if the trouble will pass, `refused` if this can never be stored."""
    place = redact(url)
    text = without_secrets(_text(error), url)
    if isinstance(error, DocumentTooLarge) or _code(error) in _TOO_BIG:
        return for_good(
            refused(
                f"MongoDB at {place}: {doing}: a document would be greater than MongoDB allows "
                f"(16 MB): {text}"
            )
        )
    if _code(error) in _FULL:
        return PublishRefused(f"MongoDB at {place}: {doing}: its disk is full: {text}")
    if isinstance(error, ConfigurationError | InvalidURI) or _code(error) in _FATAL:
        return StoreUnusable(
            f"MongoDB at {place}: {doing}: {text} (check user, password, rights and version)"
        )
    if isinstance(error, BSONError | OverflowError):
        return for_good(refused(f"MongoDB at {place}: {doing}: this cannot be stored: {text}"))
    if isinstance(error, ConnectionFailure):
        text = plain(text)
    kind = StoreUnusable if "certificate cannot be trusted" in text else away
    return kind(f"MongoDB at {place}: {doing}: {text}")


def _code(error: BaseException) -> int:
    if isinstance(error, NotPrimaryError):
        details = error.details if isinstance(error.details, dict) else {}
        return int(details.get("code") or 0)
    if isinstance(error, BulkWriteError):
        return int(_problems(error)[0].get("code") or 0)
    return int(error.code or 0) if isinstance(error, OperationFailure) else 0


def _text(error: Exception) -> str:
    """Return one line, without the topology that the library adds, and without documents."""
    if isinstance(error, BulkWriteError):
        first = _problems(error)[0].get("errmsg", "")
        return f"{len(_problems(error))} of a batch failed, the first with {first}"[:300]
    text = str(error) or type(error).__name__
    return text.partition(", Timeout:")[0].partition(", full error:")[0][:300]


def _problems(error: BulkWriteError) -> list[Any]:
    details = error.details
    return details.get("writeErrors") or details.get("writeConcernErrors") or [{}]
