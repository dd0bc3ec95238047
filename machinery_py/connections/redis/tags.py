"""Hash tag of an application in a Redis Cluster: `{machinery}` before each of its keys. Pure.

Redis hashes the first `{…}` of a key alone, so all of them are in one slot, whatever follows. In a
script tagged.lua puts the tag there, in a command of its own the driver does, by the table below.

A script does not declare its keys. It names a guard, a key of the slot that never exists: while the
slot moves to another node, Redis then refuses each script before it begins (ASK). Without the guard
a script that found half of its keys gone would be stopped in the middle of its writes.
"""

from __future__ import annotations

import binascii
import functools
from collections.abc import Sequence

from machinery_py.connections.redis.scripts import Folder, Script

SLOTS = 16_384
DEFAULT = "machinery"
GUARD = b"mpy:guard"  # behind the tag; no queue, task or lock may be called so

# Which words of a command are keys, or channels.
_NONE = frozenset(b"CLIENT CONFIG INFO PING TIME".split())
_FIRST = frozenset(
    b"EXPIRE GET GETSET HDEL HGETALL HKEYS INCRBY PEXPIRE SET SISMEMBER SMEMBERS SSCAN TYPE "
    b"XREVRANGE ZADD ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYSCORE ZREVRANGE ZSCAN".split()
)
_ALL = frozenset(b"DEL EXISTS MGET".split())
_FIRST_TWO = frozenset(b"BLMOVE".split())

_TAGGED = Folder("connections/redis/lua")


def slot_of(key: bytes) -> int:
    """Return the slot of a key: that of its hash tag between `{` and `}`, if it has one."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


def tagged_command(tag: bytes, parts: Sequence[bytes]) -> list[bytes]:
    """Return the words of a command with the tag before each key.

    Raises:
        ValueError: the table has no such command.
    """
    name = parts[0]
    if name in _NONE:
        keys = range(0)
    elif name in _FIRST:
        keys = range(1, 2)
    elif name in _ALL:
        keys = range(1, len(parts))
    elif name in _FIRST_TWO:
        keys = range(1, 3)
    elif name == b"XREAD":
        first = parts.index(b"STREAMS") + 1
        keys = range(first, (first + len(parts)) // 2)
    else:
        raise ValueError(f"{name!r}: no row says which of its words are keys in a cluster")
    return [tag + part if place in keys else part for place, part in enumerate(parts)]


@functools.cache
def tagged_script(script: Script, tag: str) -> Script:
    """Return the same script, in which the tag stands before each key."""
    quoted = "".join(f"\\{byte:03d}" for byte in tag.encode())
    return script.with_text(_TAGGED.text("tagged", TAG=quoted) + script.text)
