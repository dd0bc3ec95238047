"""The scripts of the Redis broker. The keys are described in docs/explanation/redis-protocol.md.

Each takes one msgpack array; its file in `lua/` says what is in it (In) and what it returns (Out). `now` is "" for the server's
clock, else microseconds. Queues and messages are as putting.lua says.
"""

from __future__ import annotations

from machinery_py.connections.redis.pool import DELAYED
from machinery_py.connections.redis.scripts import Folder

TOKEN_LIFE = 600  # seconds; longer than anybody repeats a submission
TOMBSTONE = 86_400_000_000  # µs that a condemned session is looked at
CLOSED = 60_000_000  # µs that a closed one is
MARK_EVERY = 250_000  # µs between two notes of when a place of a queue was filled
MARKS = 4096  # of these notes

#: What putting.lua and messages.lua name.
CONSTANTS: dict[str, object] = {"DELAYED": DELAYED, "EVERY": MARK_EVERY, "MARKS": MARKS}

_lua = Folder("brokers/redis/lua", CONSTANTS)

PUT = _lua.script("put", TOKEN_LIFE=TOKEN_LIFE)
REGISTER = _lua.script("register")
BEAT = _lua.script("beat")
CLAIM = _lua.script("claim")
DISPOSE = _lua.script("dispose")
BEGIN = _lua.script("begin")
HOLDS = _lua.script("holds")
CONDEMN = _lua.script("condemn")
LOOK = _lua.script("look")
DUE = _lua.script("due")
MOVE = _lua.script("move")
BURY = _lua.script("bury")
