"""What Redis and its client library say, as our errors.

A reply that refuses a command says that nothing was written. A reply that did not come says nothing: the caller knows
whether the command may be repeated.
"""

from __future__ import annotations

from enum import Enum

from machinery_py.errors import DecodeError, MachineryError, PublishRefused, StoreUnusable


class Kind(Enum):
    """What to do about a reply that is an error."""

    AWAY = "away"  # it will pass: a new connection, later
    FULL = "full"  # no memory
    DISK = "disk"  # Redis cannot write to its disk
    FATAL = "fatal"  # somebody must change a setting
    TYPE = "type"  # a key holds something else
    SCRIPT = "script"  # the script is not loaded
    OTHER = "other"


_WORDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (Kind.SCRIPT, ("NOSCRIPT", "No matching script")),
    (Kind.FULL, ("OOM ", "command not allowed when used memory")),
    (Kind.TYPE, ("WRONGTYPE", "against a key holding the wrong kind of value")),
    (Kind.DISK, ("MISCONF", "unable to persist on disk")),
    (Kind.AWAY, (
        "READONLY", "You can't write against a read only", "LOADING", "Redis is loading", "MASTERDOWN", "Link with MASTER",
        "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "Redis is busy", "UNBLOCKED", "NOREPLICAS", "max number of clients",
    )),
    (Kind.FATAL, (
        "NOAUTH", "Authentication required", "WRONGPASS", "invalid username-password", "invalid password", "NOPERM",
        "has no permissions", "unknown command", "Unknown Redis command", "without any password configured", "DB index",
        "without any username", "CERTIFICATE_VERIFY_FAILED", "certificate",
    )),
)  # fmt: skip


def kind_of(text: str) -> Kind:
    """What an error reply means; client libraries cut off its first word for some."""
    for kind, words in _WORDS:
        if any(word in text for word in words):
            return kind
    return Kind.OTHER


def as_ours(kind: Kind, text: str, *, place: str, doing: str, away: type[MachineryError]) -> MachineryError:
    """The error for a refused command: nothing was written."""
    match kind:
        case Kind.FULL:
            return PublishRefused(f"Redis at {place}: {doing}: broker full: its memory is used up (see maxmemory)")
        case Kind.DISK:
            return away(f"Redis at {place}: {doing}: it cannot write to its disk: {text}")
        case Kind.FATAL:
            hint = "ca_file, cert_file and key_file of the URL" if "certificate" in text else "user, password, rights and version"
            return StoreUnusable(f"Redis at {place}: {doing}: {text} (check {hint})")
        case Kind.TYPE:
            return DecodeError(f"Redis at {place}: {doing}: a key of ours holds something else: {text}")
        case Kind.AWAY:
            return away(f"Redis at {place}: {doing}: {text}")
        case _:
            return MachineryError(f"Redis at {place}: {doing}: {text}")
