"""The scripts with which the Redis broker is looked at and acted on: listings, counts, purging, pausing, dead letters."""

from __future__ import annotations

from machinery_py.brokers.redis.scripts import CONSTANTS
from machinery_py.connections.redis.scripts import Folder

_lua = Folder("brokers/redis/lua/inspect", CONSTANTS)

PENDING = _lua.script("pending")
LATE = _lua.script("late")
STATS = _lua.script("stats")
LATE_NAMES = _lua.script("late_names")
WORKERS = _lua.script("workers")
PURGE = _lua.script("purge")
PAUSE = _lua.script("pause")
RESUME = _lua.script("resume")
DEAD = _lua.script("dead")
BURY = _lua.script("bury")
TAKE_DEAD = _lua.script("take_dead")
