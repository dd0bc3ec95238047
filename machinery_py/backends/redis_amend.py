"""The scripts for the records that the engine keeps in Redis: its schedules.

    mpy:records      hash     name → record
    mpy:records:n    string   how often a record has changed
"""

from __future__ import annotations

from machinery_py._drivers.redis_lua import PRELUDE, Script
from machinery_py.backends.redis_lua import LIBRARY

# swap: let a record hold `body` if it holds `expected` ("" is no record); whether it did.
SWAP = r"""
local function holds(name, expected)
  key_type('mpy:records', 'hash')
  return (call('HGET', 'mpy:records', name) or '') == expected
end
local function swap(name, body)
  if body == '' then call('HDEL', 'mpy:records', name) else call('HSET', 'mpy:records', name, body) end
  call('INCR', 'mpy:records:n')
end
"""

# In: now, version known to the caller. Out: now, version, and names and bodies in turn, unless the version is known.
RECORDS = Script(PRELUDE + r"""
local version = call('GET', 'mpy:records:n') or '0'
local now = int(now_of(unpacked[1]))
if version == unpacked[2] then return {now, version} end
return {now, version, call('HGETALL', 'mpy:records')}
""")

# In: now, seconds that finished states are kept, name, expected, body, C of nothing or one change, S. Out: 1, or 0 if nothing
# was written.
AMEND = Script(PRELUDE + LIBRARY + SWAP + r"""
local text, expire, name, expected, body
text, expire, name, expected, body, C, S = unpack(unpacked)
local now, plan, _ = now_of(text), nil, nil
if not holds(name, expected) then return 0 end
if C[1] then
  look_at({1})
  _, plan = decide(1)
end
swap(name, body)
if plan then commit(1, plan, now, expire) end
note_states(now)
return 1
""")
