"""The scripts of the backend in a Redis Cluster, each within one slot. The steps are in docs/explanation/redis-cluster.md.

Each takes one msgpack array; its file in `lua/cluster/` says what is in it (In) and what it returns (Out). Changes, and how a
state is decided and written, are as changes.lua says; UUIDs stand as `slots.quoted` writes them.
"""

from __future__ import annotations

from machinery_py.backends.redis.scripts import CONSTANTS
from machinery_py.connections.redis.scripts import Folder

#: µs from the note of a record to the record; the servers' clocks differ by less.
NOTED_FOR = 30_000_000

#: Go's, in JSON that Go never writes, so that what Go writes over it is told from it.
_FLAG = '"ChordTriggered": true'

_lua = Folder("backends/redis/lua/cluster", CONSTANTS | {"NOTED": NOTED_FOR, "FLAG": _FLAG})

FLAG = _lua.script("flag")
CHANGE = _lua.script("change")
GROUP = _lua.script("group")
ARRIVE = _lua.script("arrive")
LOOK_AT = _lua.script("look_at")
FORGET_GROUP = _lua.script("forget_group")
FORGET_TASK = _lua.script("forget_task")
LOOSEN = _lua.script("loosen")
SENT = _lua.script("sent")
AMEND = _lua.script("amend")
CLAIM = _lua.script("claim")
AMEND_CLAIM = _lua.script("amend_claim")
RELEASE = _lua.script("release")
SCHEDULES = _lua.script("schedules")

# The listings: they are in shards, whose prefix is that of the guard.

NOTE = _lua.script("note")
DROP = _lua.script("drop")
RECORDS = _lua.script("records")
LIST = _lua.script("list")
RATES = _lua.script("rates")
EXPIRE = _lua.script("expire")
