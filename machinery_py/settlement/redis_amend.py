"""The script that changes a record and sends messages with it, where broker and backend are one Redis."""

from __future__ import annotations

from machinery_py._drivers.redis_lua import Script
from machinery_py.backends.redis_amend import SWAP
from machinery_py.backends.redis_lua import LIBRARY as STATES
from machinery_py.brokers.redis_lua import LIBRARY as MESSAGES

# In: now, seconds that finished states are kept, name, expected, body, change or false, queues, messages.
# Out: nothing if the record held something else, else connections to be woken.
AMEND = Script(MESSAGES + STATES + SWAP + r"""
local text, expire, name, expected, body, change, queues, messages = unpack(unpacked)
local now, rung, plan = now_of(text), {}, nil
if not holds(name, expected) then return false end
check(queues, messages)
if change then
  local _
  _, plan = decide(change)
end
swap(name, body)
for _, q in ipairs(queues) do call('SADD', 'mpy:queues', q[1]) end
if plan then commit(change, plan, now, expire) end
note_states(now)
put(queues, messages, now, rung)
return rung
""")
