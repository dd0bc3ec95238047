"""Descriptors that are this process's alone: the pipes and sockets of the library.

A forked child has a copy of each. It would keep connections open that the parent has closed, hold
its ports, and write into its pipes. So in a child the null device takes the place of each: the
number stays taken until its owner closes it, and a reader finds an end of file. An executed program
(subprocess, spawn) inherits none, as all are closed there.

In the process itself a task may close them (`os.closerange`); the library would then read and write
whatever gets their numbers next. `broken` finds out.

Limits: not known here are the files of SQLite, which are closed before a fork, the sockets of
pymongo, which closes its own in a child, and selectors.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Protocol


class HasNumber(Protocol):
    """A socket; -1 when it is closed."""

    def fileno(self) -> int: ...


Identity = tuple[int, int, int]  # device, inode, kind: what a number stands for

_numbers: dict[int, Identity] = {}
_sockets: weakref.WeakKeyDictionary[HasNumber, Identity] = weakref.WeakKeyDictionary()


def keep(thing: int | HasNumber) -> None:
    """Add this descriptor, or that of this socket. A number must be dropped before it is closed."""
    if isinstance(thing, int):
        _numbers[thing] = _identity(thing)
    else:
        _sockets[thing] = _identity(thing.fileno())


def drop(number: int) -> None:
    """Forget a descriptor that is about to be closed."""
    _numbers.pop(number, None)


def broken() -> list[int]:
    """Return the descriptors that somebody else has closed or replaced."""
    found = [
        number
        for number, identity in list(_numbers.items())
        if _is_changed(number, identity) and number in _numbers
    ]
    for one, identity in _kept():
        number = one.fileno()
        # The second fileno() finds out whether it is being closed at this moment.
        if number >= 0 and _is_changed(number, identity) and one.fileno() == number:
            found.append(number)
    return found


def _kept() -> Iterator[tuple[HasNumber, Identity]]:
    """Yield the sockets that are there now; others may be added and closed meanwhile."""
    for reference in _sockets.keyrefs():  # unlike items(), one step for other threads
        one = reference()
        if one is not None and (identity := _sockets.get(one)) is not None:
            yield one, identity


def _is_changed(number: int, identity: Identity) -> bool:
    try:
        return _identity(number) != identity
    except OSError:
        return True


def _identity(number: int) -> Identity:
    found = os.fstat(number)
    return found.st_dev, found.st_ino, found.st_mode


def _after_fork_in_child() -> None:
    numbers = {*_numbers, *(number for one, _ in _kept() if (number := one.fileno()) >= 0)}
    _numbers.clear()
    _sockets.clear()
    if not numbers:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers:
        os.dup2(null, number, inheritable=False)
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
