"""The scripts of the backend in a Redis Cluster, each within one slot.

Each takes one msgpack array; its file in `lua/cluster/` says what is in it (In) and what it returns
(Out). Changes are as changes.lua says; UUIDs stand as `slots.quoted` writes them.
"""

from __future__ import annotations

from machinery_py.backends.redis.scripts import CONSTANTS
from machinery_py.connections.redis.scripts import Folder

#: µs from the note of a record to the record; the servers' clocks differ by less.
NOTED_FOR = 30_000_000

#: Go's, in JSON that Go never writes, so that what Go writes over it is told from it.
_FLAG = '"ChordTriggered": true'

_lua = Folder("backends/redis/lua/cluster", CONSTANTS | {"NOTED": NOTED_FOR, "FLAG": _FLAG})

FLAG = _lua.script("flag", "settling groups")
CHANGE = _lua.script("change", "writing states")
GROUP = _lua.script("group")
ARRIVE = _lua.script("arrive")
LOOK_AT = _lua.script("look_at", "looking for complete groups")
FORGET_GROUP = _lua.script("forget_group", "forgetting groups")
FORGET_TASK = _lua.script("forget_task")
LOOSEN = _lua.script("loosen", "letting results expire")
SENT = _lua.script("sent", "clearing outboxes")
AMEND = _lua.script("amend", "changing a schedule")
CLAIM = _lua.script("claim", "reading claims")
AMEND_CLAIM = _lua.script("amend_claim", "changing a claim")
RELEASE = _lua.script("release", "releasing claims")

# The listings: they are in shards, whose prefix is that of the guard.

NOTE = _lua.script("note", "noting what follows")
DROP = _lua.script("drop", "clearing outboxes")
RECORDS = _lua.script("records", "looking for outboxes")
LIST = _lua.script("list")
EXPIRE = _lua.script("expire", "looking for what is over")
