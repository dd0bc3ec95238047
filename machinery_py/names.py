"""Names that tasks, queues, tasks' and groups' UUIDs and locks may have.

In the stores names are keys: on Redis a queue's list and a task's document lie under their bare
names, as in Go, and in RabbitMQ a UUID is a queue. So a name that is reserved for the one must not
be taken for the other. Every name is a text of 1 to 255 bytes in UTF-8 without control characters
and without the beginnings in RESERVED. All names that Go Machinery makes are legal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Final

from machinery_py.errors import ArgumentError, NameRefused
from machinery_py.texts import printable, quoted

LONGEST = 255  # bytes; AMQP has no more for a queue
REASON = "bad-name"  # of a dead letter

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

# UUIDs as Go and this library make them. No queue may have such a name; such a UUID is not checked.
is_made: Final = re.compile(
    r"(?:task|chord|group(?:_flow|_rest|_retry)?)"
    r"_[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
).fullmatch

# On Redis: Go's set of delayed messages, its locks, and all of ours. In RabbitMQ: the server's own,
# and what we declare.
_KEYS = r"delayed_tasks\Z|TriggerChordMutex\Z|machinery_lock_|mpy:"
_QUEUES = (
    r"amq\.|machinery\.(?:control|dead|delay|finished|held|lock|paused|queues|results|revocations"
    r"|sha256|topics|workers)(?:\.|\Z)"
)
#: Beginnings that no name of a queue, or no UUID of a task or group, may have.
RESERVED = {
    "queue": re.compile(f"{_KEYS}|{_QUEUES}"),
    "UUID": re.compile(rf"{_KEYS}|machinery_tasks\Z"),
}


def is_safe(text: str) -> bool:
    """Whether there are no control characters and no half of a surrogate pair in the text."""
    return _UNSAFE.search(text) is None


def _problem(kind: str, name: object) -> str:
    """Return what is wrong with a name of this kind; "" if nothing."""
    if not isinstance(name, str):
        return "is no text"
    if not name:
        return "is empty"
    if (found := _UNSAFE.search(name)) is not None:
        return f"holds {found[0]!r}, a control character or half a surrogate pair"
    size = len(name.encode())
    if size > LONGEST:
        return f"has {size:,} bytes (at most {LONGEST})"
    if kind in RESERVED and RESERVED[kind].match(name):
        return "is reserved for the store (choose another)"
    if kind == "queue" and is_made(name):
        return "is reserved for tasks and groups, whose UUIDs look like it (choose another)"
    return ""


def queue_problem(name: str) -> str:
    """Return what is wrong with the name of a queue; "" if nothing."""
    text = _problem("queue", name)
    return f"queue {quoted(name)} {text}" if text else ""


def check_encodable(call: str, names: Iterable[str]) -> None:
    """Raise ArgumentError if one of the names that a call is given holds half a surrogate pair."""
    for name in names:
        if printable(name) != name:
            raise ArgumentError(f"{call}: {quoted(name)} holds half a surrogate pair")


def _check(kind: str, name: str) -> None:
    if text := _problem(kind, name):
        shown = quoted(name) if isinstance(name, str) else repr(name)
        raise NameRefused(f"{kind} {shown} {text}", str(name))


def check_queue(name: str) -> None:
    """Raise NameRefused if no queue may have this name."""
    _check("queue", name)


def check_task(name: str) -> None:
    """Raise NameRefused if no task may have this name."""
    _check("task", name)


def check_step(name: str) -> None:
    """Raise NameRefused if no step of a task may have this name."""
    _check("step", name)
    if "#" in name:
        raise NameRefused(f"step {quoted(name)} holds '#' (which counts the steps of a name)", name)


def check_signal(name: str, key: str = "") -> None:
    """Raise NameRefused if no signal may have this name, or this key."""
    check_step(name)
    if key:
        _check("key", key)


def check_lock(name: str) -> None:
    """Raise NameRefused if no lock may have this name."""
    _check("lock", name)


def check_uuid(uuid: str, *others: str) -> None:
    """Check the UUID of a task or group.

    Raises:
        NameRefused: it cannot be one, or is one of the others: its queues, its group.
    """
    if isinstance(uuid, str) and is_made(uuid):
        return
    _check("UUID", uuid)
    if uuid in others:
        raise NameRefused(
            f"UUID {quoted(uuid)} is also the name of its queue or group (choose another)", uuid
        )


def check_message(*queues: str, name: str, uuid: str, group_uuid: str) -> None:
    """Check the names in a signature; an empty one is none.

    Args:
        queues: those that the signature names, its own first.

    Raises:
        NameRefused: for the first that cannot be used.
    """
    check_call(name, queues[0])
    if uuid and not is_made(uuid):
        check_uuid(uuid, *queues)
    if group_uuid:
        check_uuid(group_uuid, uuid, *queues)


@functools.lru_cache(maxsize=4096)
def check_call(name: str, queue: str) -> None:
    """Check the names of a task and of its queue, if it has one; good ones are remembered."""
    check_task(name)
    if queue:
        check_queue(queue)
