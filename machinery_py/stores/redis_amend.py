"""The script that changes a record and sends messages with it, where broker and backend are one Redis."""

from __future__ import annotations

from machinery_py.backends.redis.lua import LIBRARY as STATES
from machinery_py.backends.redis.records import SWAP
from machinery_py.brokers.redis.lua import PUTTING
from machinery_py.connections.redis.scripts import Script

# In: now, seconds that finished states are kept, name, expected, body, life, C of nothing or one change, S, queues,
# messages. Out: nothing if the record held something else, else connections to be woken.
AMEND = Script(
    PUTTING
    + STATES
    + SWAP
    + r"""
local text, expire, name, expected, body, life, queues, messages
text, expire, name, expected, body, life, C, S, queues, messages = unpack(unpacked)
local now, rung, plan, _ = now_of(text), {}, nil, nil
if not holds(name, expected, life) then return false end
check(queues, messages, now)
if C[1] then
  listable({1})
  look_at({1})
  _, plan = decide(1)
end
swap(name, body, life)
if plan then commit(1, plan, now, expire) end
note_states(now)
put(queues, messages, now, rung)
return rung
"""
)
