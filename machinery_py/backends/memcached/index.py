"""Index of open outboxes and of groups that wait for their callback, in a store that lists no keys.

    mpy:roots         the segments that there are; changed by `cas` when a process gets or loses one
    mpy:x:<segment>   outboxes and ready groups that one process has opened; only that one writes it

A segment is written before its entries become true, and shortened later, so it lists too much and
never too little: a reader looks at each entry. The segment of a dead process stays until all its
entries are done.

Limits: an evicted segment hides what it lists. A redelivered task finishes its own outbox without
it; the callback of a chord whose last worker died just then is found by the index alone.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Iterable

import msgspec

from machinery_py.backends.memcached.documents import CHORD_LIFE
from machinery_py.clock import micros
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.memcached.client import (
    Item,
    LineCommand,
    MemcacheDriver,
    delete,
    put,
    seconds,
    swap,
)
from machinery_py.connections.memcached.keys import ROOTS, SEGMENT

LONGEST = 2000  # entries of a segment; then another is begun
REFRESH = 60.0  # seconds between two signs of life of a segment
DEAD = 600.0  # seconds without one, until a segment without open entries is forgotten


class Segment(msgspec.Struct, array_like=True, gc=False):
    """Keys that one process has opened."""

    at: int  # µs
    outboxes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


_pack = msgspec.msgpack.Encoder().encode
_segment = msgspec.msgpack.Decoder(Segment).decode
_roots = msgspec.msgpack.Decoder(list[bytes]).decode


#: Whether it is a group, and its key.
Entry = tuple[bool, str]


class Index:
    """This process's segment, and a reader of all. May be used from any thread."""

    def __init__(self, driver: MemcacheDriver) -> None:
        self._driver = driver
        self._lock = ForkLock()
        self._pid = os.getpid()
        self._name = b""
        self._open: dict[Entry, None] = {}  # in the order in which they were opened
        self._written: set[Entry] = set()
        self._registered = False
        self._written_at = 0.0

    def note(self, *, outboxes: Collection[str] = (), groups: Collection[str] = ()) -> None:
        """List these, before they are true."""
        with self._lock:
            self._own()
            new = dict.fromkeys(_entries(outboxes, groups))
            self._open.update(new)
            if new.keys() <= self._written and self._registered:
                return
            if len(self._open) > LONGEST:
                # Whoever reads the old segment looks after what it lists.
                self._name, self._registered, self._open = _new_name(), False, new
            self._write()

    def drop(self, *, outboxes: Iterable[str] = (), groups: Iterable[str] = ()) -> None:
        """Drop keys that are done. Written with the next note, or by `tend`."""
        with self._lock:
            for entry in _entries(outboxes, groups):
                self._open.pop(entry, None)

    def _own(self) -> None:
        if not self._name or self._pid != os.getpid():
            self._name, self._registered, self._pid = _new_name(), False, os.getpid()
            self._open, self._written = {}, set()

    def _segment(self) -> Segment:
        now = micros(self._driver.clock.now())
        outboxes = tuple(key for is_group, key in self._open if not is_group)
        return Segment(now, outboxes, tuple(key for is_group, key in self._open if is_group))

    def _write(self) -> None:
        command = put(SEGMENT + self._name, _pack(self._segment()), seconds(CHORD_LIFE))
        self._driver.send([command], doing="listing what is open")
        self._written, self._written_at = set(self._open), time.monotonic()
        if not self._registered:
            self._change_roots(added={self._name})
            self._registered = True

    def _change_roots(self, added: Collection[bytes] = (), removed: Collection[bytes] = ()) -> None:
        def change(key: bytes, item: Item | None) -> LineCommand | None:
            names = _roots(item.value) if item else []
            wanted = [
                *(one for one in names if one not in removed),
                *(one for one in added if one not in names),
            ]
            return swap(key, _pack(wanted), b"0", item) if wanted != names else None

        self._driver.edit([ROOTS], change, doing="changing the list of segments")

    def segments(self) -> dict[bytes, Segment]:
        """Return all that there are, this process's own as it is in memory."""
        item = self._driver.fetch([ROOTS], doing="reading the list of segments").get(ROOTS)
        names = _roots(item.value) if item else []
        keys = {SEGMENT + name: name for name in names}
        found = self._driver.fetch(keys, doing="reading what is open")
        segments = {name: _segment(found[key].value) for key, name in keys.items() if key in found}
        with self._lock:
            self._own()
            if self._open:
                # The list was evicted, or somebody took this process for dead.
                if self._registered and (self._name not in segments):
                    self._registered = False
                    self._write()
                segments[self._name] = self._segment()
        return segments

    def tend(self, open_entries: Collection[str]) -> None:
        """Shorten our segment, and forget those of the dead in which nothing is open any more."""
        with self._lock:
            is_old = self._written and time.monotonic() - self._written_at > REFRESH
            is_ours = self._name and self._pid == os.getpid()
            if is_ours and (is_old or self._written != self._open.keys()):
                self._write()
        before = micros(self._driver.clock.now()) - int(DEAD * 1e6)
        over = [
            name
            for name, segment in self.segments().items()
            if name != self._name
            and segment.at < before
            and not any(entry in open_entries for entry in (*segment.outboxes, *segment.groups))
        ]
        if over:
            self._change_roots(removed=over)
            self._driver.send(
                [delete(SEGMENT + name) for name in over], doing="forgetting segments"
            )


def _entries(outboxes: Iterable[str], groups: Iterable[str]) -> list[Entry]:
    return [*((False, key) for key in outboxes), *((True, key) for key in groups)]


def _new_name() -> bytes:
    return secrets.token_hex(8).encode()
