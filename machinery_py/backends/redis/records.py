"""The scripts for the records that the app keeps in Redis: its schedules, and the keys of unique tasks.

mpy:records      hash     name → record
mpy:records:n    string   how often a record has changed
mpy:u:<name>     string   a claim: the key of a unique task; expires
"""

from __future__ import annotations

from machinery_py.backends.redis.lua import LIBRARY
from machinery_py.connections.redis.scripts import PRELUDE, Script

CLAIM = b"mpy:u:"

# holds: whether a record holds `expected` ("" is no record). swap: let it hold `body`. With a life, in seconds, it is a claim.
SWAP = r"""
local function holds(name, expected, life)
  if life > 0 then
    key_type('mpy:u:' .. name, 'string')
    return (call('GET', 'mpy:u:' .. name) or '') == expected
  end
  key_type('mpy:records', 'hash')
  counter('mpy:records:n')
  return (call('HGET', 'mpy:records', name) or '') == expected
end
local function swap(name, body, life)
  if life > 0 then
    if body == '' then call('DEL', 'mpy:u:' .. name) else call('SET', 'mpy:u:' .. name, body, 'EX', int(life)) end
    return
  end
  if body == '' then call('HDEL', 'mpy:records', name) else call('HSET', 'mpy:records', name, body) end
  call('INCR', 'mpy:records:n')
end
"""

# In: now, version known to the caller. Out: now, version, and names and bodies in turn, unless the version is known.
RECORDS = Script(
    PRELUDE
    + r"""
local version = call('GET', 'mpy:records:n') or '0'
local now = int(now_of(unpacked[1]))
if version == unpacked[2] then return {now, version} end
return {now, version, call('HGETALL', 'mpy:records')}
"""
)

# In: now, seconds that finished states are kept, name, expected, body, life, C of nothing or one change,
# S. Out: 1, or 0 if nothing
# was written.
AMEND = Script(
    PRELUDE
    + LIBRARY
    + SWAP
    + r"""
local text, expire, name, expected, body, life
text, expire, name, expected, body, life, C, S = unpack(unpacked)
local now, plan, _ = now_of(text), nil, nil
if not holds(name, expected, life) then return 0 end
if C[1] then
  listable({1})
  look_at({1})
  _, plan = decide(1)
end
swap(name, body, life)
if plan then commit(1, plan, now, expire) end
note_states(now)
return 1
"""
)

# In: (name, body) of claims. Out: nothing.
RELEASE = Script(
    PRELUDE
    + r"""
for _, one in ipairs(unpacked[1]) do key_type('mpy:u:' .. one[1], 'string') end
for _, one in ipairs(unpacked[1]) do
  local key = 'mpy:u:' .. one[1]
  if call('GET', key) == one[2] then call('DEL', key) end
end
"""
)
