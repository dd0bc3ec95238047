"""Errors of Redis and its client library, as ours.

A reply that refuses a command says that nothing was written. After a reply that did not come, that
is unknown: the caller knows whether the command may be repeated.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from enum import Enum

from machinery_py.errors import MachineryError, NameRefused, PublishRefused, StoreUnusable, for_good
from machinery_py.texts import get_logger

logger = get_logger(__name__)

LOG_EVERY = 60.0  # seconds between two log lines about the same key
_logged: dict[bytes, float] = {}  # when


class ErrorKind(Enum):
    """Kinds of error replies, by what to do about them."""

    AWAY = "away"  # it will pass: a new connection, later
    ROLE = "role"  # the same, and another server may do it now
    SLOT = "slot"  # the same: the slots of a cluster are on their way
    FULL = "full"  # no memory
    DISK = "disk"  # Redis cannot write to its disk
    FATAL = "fatal"  # somebody must change a setting
    TYPE = "type"  # a key holds something else
    NEVER = "never"  # this very command: its size, or a key that this user may not use
    SCRIPT = "script"  # the script is not loaded
    OTHER = "other"


_WORDS: tuple[tuple[ErrorKind, tuple[str, ...]], ...] = (
    (ErrorKind.SCRIPT, ("NOSCRIPT", "No matching script")),
    (ErrorKind.FULL, ("OOM ", "command not allowed when used memory")),
    (ErrorKind.TYPE, ("WRONGTYPE", "against a key holding the wrong kind of value")),
    (ErrorKind.DISK, ("MISCONF", "unable to persist on disk")),
    (ErrorKind.ROLE, (
        "READONLY", "You can't write against a read only", "LOADING", "Redis is loading",
        "MASTERDOWN", "Link with MASTER",
    )),
    (ErrorKind.SLOT, ("CLUSTERDOWN", "UNBLOCKED", "access a non local key")),
    (ErrorKind.AWAY, ("TRYAGAIN", "BUSY ", "Redis is busy", "NOREPLICAS", "max number of clients")),
    (ErrorKind.NEVER, (
        "one of the keys", "permissions to access a key", "invalid bulk length",
        "exceeds proto-max-bulk-len",
    )),
    (ErrorKind.FATAL, (
        "NOAUTH", "Authentication required", "WRONGPASS", "invalid username-password",
        "invalid password", "NOPERM", "has no permissions", "unknown command",
        "Unknown Redis command", "without any password configured", "DB index",
        "without any username", "CERTIFICATE_VERIFY_FAILED", "certificate",
    )),
)  # fmt: skip


TRANSIENT = (ErrorKind.AWAY, ErrorKind.ROLE, ErrorKind.SLOT)

# As key_type and the other checks of the scripts say it.
_SPOILT = re.compile(
    r"WRONGTYPE (?P<key>.+?) (?P<found>(?:holds|is) a .+?)(?: script: .*)?\Z", re.DOTALL
)
#: Our keys that all tasks share, not those of one task, group or queue.
_SHARED = re.compile(r"mpy:[a-z]+(?::[n0-9]+)?\Z")
_HINTS = (
    ("certificate", "ca_file, cert_file and key_file of the URL"),
    ("CERTIFICATE", "ca_file, cert_file and key_file of the URL"),
    ("DB index", "the number of the database in the URL"),
)  # fmt: skip


def kind_of(text: str) -> ErrorKind:
    """Return the kind of an error reply; client libraries cut off the first word of some."""
    for kind, words in _WORDS:
        if any(word in text for word in words):
            return kind
    return ErrorKind.OTHER


def as_ours(
    kind: ErrorKind, text: str, *, place: str, doing: str, away: type[MachineryError]
) -> MachineryError:
    """Return our error for a refused command: nothing was written."""
    where = f"Redis at {place}: {doing}"
    match kind:
        case ErrorKind.FULL:
            return PublishRefused(f"{where}: broker full: its memory is used up (see maxmemory)")
        case ErrorKind.DISK:
            return away(f"{where}: it cannot write to its disk: {text}")
        case ErrorKind.FATAL:
            hints = (hint for word, hint in _HINTS if word in text)
            hint = next(hints, "user, password, rights and version")
            return StoreUnusable(f"{where}: {text} (check {hint})")
        case ErrorKind.NEVER:
            error = PublishRefused if issubclass(away, PublishRefused) else StoreUnusable
            hint = "check the keys in the user's ACL"
            if "bulk" in text:
                hint = "it is larger than proto-max-bulk-len"
            return for_good(error(f"{where}: {text} ({hint})"))
        case ErrorKind.TYPE:
            return spoilt(text, where)
        case ErrorKind.AWAY | ErrorKind.ROLE | ErrorKind.SLOT:
            return away(f"{where}: {text}")
        case _:
            return MachineryError(f"{where}: {text}")


def spoilt(text: str, where: str) -> StoreUnusable | NameRefused:
    """Return our error for a key that holds something else: nothing was written.

    A key that all tasks need must be put right, and until then nothing is lost: StoreUnusable. A
    key of one task, group or queue is the fault of that name: NameRefused.
    """
    found = _SPOILT.search(text)
    if found is None:
        return NameRefused(f"{where}: a key holds something else: {text}")
    key, what = found["key"], found["found"]
    is_gos_delayed_set = what.endswith("not a zset") and not key.startswith("mpy:")
    if _SHARED.match(key) or is_gos_delayed_set:
        return StoreUnusable(
            f"{where}: key {key!r} {what}: another program has written to it "
            "(rename or delete the key)"
        )
    return NameRefused(
        f"{where}: key {key!r} {what}: it is not ours, and was left as it is (choose another name)",
        key,
    )


def log_spoilt(problems: Iterable[bytes], *, doing: str) -> None:
    """Log keys that hold something else, each once a minute: a script did the rest without them."""
    for text in problems:
        now = time.monotonic()
        if now - _logged.get(text, -math.inf) > LOG_EVERY:
            if len(_logged) > 1000:
                _logged.clear()
            _logged[text] = now
            logger.error("%s", spoilt(text.decode(errors="replace"), f"Redis: {doing}"))
