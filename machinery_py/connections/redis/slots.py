"""Slots of a Redis Cluster, and scripts that stay in one.

A script names a guard in its slot, a key that never exists. While a slot is moved to another node,
Redis then refuses every script in it before it begins (ASK at the old node, MOVED at the new one,
which we never ask with ASKING). Without the guard a script that found half of its keys gone would
be stopped in the middle of its writes.

In a cluster the keys that belong to no queue are each queue's own: `local_key` puts the prefix of
the slot before them.
"""

from __future__ import annotations

import binascii
import functools

from machinery_py.connections.redis.keys import DELAYED, FENCE, QUEUES, REVOKED, TOKENS
from machinery_py.connections.redis.scripts import Folder, Script

SLOTS = 16_384
_OF_NO_QUEUE = (QUEUES, DELAYED.encode(), REVOKED, FENCE.encode())

_CALL = "local call = redis.call\n"
_LOCAL_CALL = Folder("connections/redis/lua").text(
    "local_call", OURS=", ".join(f"[{key.decode()!r}] = 1" for key in _OF_NO_QUEUE)
)


def slot_of(key: bytes) -> int:
    """Return the slot of a key: that of its hash tag between `{` and `}`, if it has one."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


def guard(prefix: bytes) -> bytes:
    """Return the guard of the slot of this prefix. No key of ours is called so."""
    return prefix + b"0"


@functools.cache
def clustered(script: Script) -> Script:
    """Return the same script, in which the keys that belong to no queue are those of its slot."""
    if script.text.count(_CALL) != 1:
        raise ValueError("a script for a cluster begins with prelude.lua, once")
    return script.with_text(script.text.replace(_CALL, _LOCAL_CALL))


def local_key(prefix: bytes, key: bytes) -> bytes:
    """Return the name that the scripts of `clustered` give to a key."""
    return prefix + key if key in _OF_NO_QUEUE or key.startswith(TOKENS) else key


def quoted(name: str) -> str:
    """Return a name as it stands between the braces of our keys: without braces, and not empty."""
    if "%" in name or "{" in name or "}" in name:
        return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return name or "%"


def unquoted(name: str) -> str:
    if "%" not in name:
        return name
    return "" if name == "%" else name.replace("%7D", "}").replace("%7B", "{").replace("%25", "%")
