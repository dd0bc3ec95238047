"""What a consumer runs at this moment, kept where it outlives the process: in the file that proves its life.

    <folder>/<key>    SLOTS numbers of 8 bytes: the ids of the messages whose tasks are being called, 0 where none is

The file is mapped, so that a note costs no system call, and a process that is killed leaves it as it was. Whoever gives the
consumer up reads it, and blames these messages alone.
"""

from __future__ import annotations

import mmap
import os
import struct

SLOTS = 1024
_SIZE = SLOTS * 8
_ALL = 2**64 - 1  # in slot 0: more ran than there are slots

_number = struct.Struct("<Q")


class RunTable:
    """The owner's side. May be used from any thread."""

    def __init__(self, descriptor: int) -> None:
        os.ftruncate(descriptor, _SIZE)
        self._map = mmap.mmap(descriptor, _SIZE)
        self._free = list(range(SLOTS - 1, 0, -1))
        self._slots: dict[int, int] = {}

    def begins(self, id: int) -> None:
        try:
            slot = self._free.pop()
        except IndexError:
            _number.pack_into(self._map, 0, _ALL)
            return
        self._slots[id] = slot
        _number.pack_into(self._map, slot * 8, id)

    def ends(self, id: int) -> None:
        slot = self._slots.pop(id, None)
        if slot is not None:
            _number.pack_into(self._map, slot * 8, 0)
            self._free.append(slot)


def read(path: str) -> list[int] | None:
    """The ids of what its owner runs, or ran when it died. None: that cannot be known."""
    try:
        with open(path, "rb") as file:
            content = file.read(_SIZE)
    except OSError:
        return None
    if len(content) != _SIZE:
        return None
    ids = [id for (id,) in _number.iter_unpack(content) if id]
    return None if _ALL in ids else ids
