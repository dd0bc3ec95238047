"""Index of open outboxes and of groups that wait for their callback, in a store that lists no keys.

    mpy:l:<n>     SEGMENTS items; in each the entries of some processes, changed by `cas`

An entry is written before it is true, and taken out some time after it is done: so the index lists
too much and never too little, and a reader looks at each entry. A process writes its own entries
anew each time; those of a dead one are taken out by others when nothing of them is open any more.

Limits: an evicted item hides what it lists, until its processes write again. A redelivered task
finishes its own outbox without it; the callback of a chord whose last worker died just then is
found by the index alone.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec

from machinery_py.backends.memcached.documents import CHORD_LIFE
from machinery_py.clock import micros
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.memcached.client import (
    Item,
    LineCommand,
    MemcacheDriver,
    seconds,
    swap,
)
from machinery_py.connections.memcached.keys import OPEN

SEGMENTS = 32
LONGEST = 2000  # entries of an item, and of an owner; then there is another one
DEAD = 600.0  # seconds until others may take an entry out


class OpenName(NamedTuple):
    """The key of an outbox, or the UUID of a group."""

    is_group: bool
    key: str


class Entry(NamedTuple):
    """An entry of the index. `at`: µs; `owner`: a name of the process that has written it."""

    name: OpenName
    at: int
    owner: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Entry]).decode


class Index:
    """This process's entries, and a reader of all. May be used from any thread."""

    def __init__(self, driver: MemcacheDriver) -> None:
        self._driver = driver
        self._lock = ForkLock()
        self._begin()

    def _begin(self) -> None:
        self._pid, self._owner = os.getpid(), secrets.token_hex(6)
        self._key = _key(random.randrange(SEGMENTS))
        self._open: dict[OpenName, int] = {}  # → since when

    def note(self, *, outboxes: Collection[str] = (), groups: Collection[str] = ()) -> None:
        """List these, before they are true."""
        names = _names(outboxes, groups)
        if names:
            with self._lock:
                # What is open by then stays listed, as that of a dead process.
                if self._pid != os.getpid() or len(self._open) > LONGEST:
                    self._begin()
                self._open.update(dict.fromkeys(names, self._now()))
                self._write([self._key])

    def drop(self, *, outboxes: Collection[str] = (), groups: Collection[str] = ()) -> None:
        """Drop what is done. It is taken out with the next `note`, or by `tend`."""
        with self._lock:
            for name in _names(outboxes, groups):
                self._open.pop(name, None)

    def names(self) -> set[OpenName]:
        """Return all that any process has listed, and this one, though it was evicted."""
        items = self._driver.fetch(map(_key, range(SEGMENTS)), doing="reading what is open")
        with self._lock:
            own = set(self._open) if self._pid == os.getpid() else set[OpenName]()
        return own.union(*({one.name for one in _decode(item.value)} for item in items.values()))

    def tend(self, still_open: Collection[OpenName]) -> None:
        """Take out what this process has done, and old entries that are open no more."""
        before = self._now() - int(DEAD * 1e6)

        def is_over(name: OpenName, at: int) -> bool:
            return at < before and name not in still_open

        with self._lock:
            if self._pid == os.getpid():
                self._open = {one: at for one, at in self._open.items() if not is_over(one, at)}
                self._write(map(_key, range(SEGMENTS)), is_over)

    def _now(self) -> int:
        return micros(self._driver.clock.now())

    def _write(
        self, keys: Iterable[bytes], is_over: Callable[[OpenName, int], bool] | None = None
    ) -> None:
        """Write this process's entries in place of those that there were; drop others' old ones."""

        def change(key: bytes, item: Item | None) -> LineCommand | None:
            before = _decode(item.value) if item is not None else []
            after = [
                one
                for one in before
                if one.owner != self._owner and not (is_over and is_over(one.name, one.at))
            ]
            if key == self._key:
                after += [Entry(name, at, self._owner) for name, at in self._open.items()]
                if len(after) > LONGEST:
                    self._key = _key(random.randrange(SEGMENTS))  # for the next ones
            return swap(key, _encode(after), seconds(CHORD_LIFE), item) if after != before else None

        self._driver.edit(keys, change, doing="listing what is open")


def _key(number: int) -> bytes:
    return OPEN + b"%d" % number


def _names(outboxes: Collection[str], groups: Collection[str]) -> list[OpenName]:
    return [*(OpenName(False, key) for key in outboxes), *(OpenName(True, key) for key in groups)]
