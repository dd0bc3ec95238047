"""The scripts for the records that the app keeps in Redis: its schedules, and the keys of unique tasks.

mpy:records      hash     name → record
mpy:records:n    string   how often a record has changed
mpy:u:<name>     string   a claim: the key of a unique task; expires
"""

from __future__ import annotations

from machinery_py.backends.redis.scripts import CONSTANTS
from machinery_py.connections.redis.scripts import Folder

CLAIM = b"mpy:u:"

_lua = Folder("backends/redis/lua/records", CONSTANTS)

RECORDS = _lua.script("records")
AMEND = _lua.script("amend")
RELEASE = _lua.script("release")
