"""The scripts that change messages and states of one Redis as one step (docs/explanation/redis-protocol.md).

What is in queues, messages, states, groups, arrivals and changes is said in brokers/redis/lua/putting.lua and
backends/redis/lua/changes.lua.
"""

from __future__ import annotations

from machinery_py.backends.redis.scripts import CONSTANTS as STATES
from machinery_py.brokers.redis.scripts import CONSTANTS as MESSAGES
from machinery_py.brokers.redis.scripts import TOKEN_LIFE
from machinery_py.connections.redis.scripts import Folder

_lua = Folder("stores/lua", MESSAGES | STATES)

SUBMIT = _lua.script("submit", TOKEN_LIFE=TOKEN_LIFE)
SETTLE = _lua.script("settle")
FIRE = _lua.script("fire")
AMEND = _lua.script("amend")
