"""Running tasks of a consumer, kept where they outlive the process: in the file that proves its life.

    <folder>/<key>    SLOTS numbers of 8 bytes, each names a delivery whose task is being called; 0 where none is

The file is mapped, so that a note costs no system call, and a process that is killed leaves it as it was. Whoever gives the
consumer up reads it, and blames these deliveries alone. What is beyond SLOTS is not noted, and not blamed.
"""

from __future__ import annotations

import mmap
import os
import struct

SLOTS = 4096
_SIZE = SLOTS * 8

_number = struct.Struct("<Q")


class RunTable:
    """The owner's side. May be used from any thread."""

    def __init__(self, descriptor: int) -> None:
        # Written, not only made longer: on a full disk this fails, and not the first note, which would kill the process.
        os.write(descriptor, bytes(_SIZE))
        self._map = mmap.mmap(descriptor, _SIZE)
        self._free = list(range(SLOTS - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._again: list[int] = []  # noted already, by a twin of the message that runs beside it

    def begins(self, id: int) -> None:
        if id in self._slots:
            self._again.append(id)
            return
        try:
            slot = self._free.pop()
        except IndexError:
            return
        self._slots[id] = slot
        _number.pack_into(self._map, slot * 8, id)

    def ends(self, id: int) -> None:
        if self._again and id in self._again:
            self._again.remove(id)
            return
        slot = self._slots.pop(id, None)
        if slot is not None:
            _number.pack_into(self._map, slot * 8, 0)
            self._free.append(slot)

    def running(self) -> set[int]:
        return set(self._slots)


def read(path: str) -> set[int] | None:
    """Return what its owner runs, or ran when it died. None: that cannot be known."""
    try:
        with open(path, "rb") as file:
            content = file.read(_SIZE)
    except OSError:
        return None
    return {id for (id,) in _number.iter_unpack(content) if id} if len(content) == _SIZE else None
