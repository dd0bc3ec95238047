"""The scripts with which the Redis broker is looked at and acted on: listings, counts, purging, pausing, dead letters."""

from __future__ import annotations

from machinery_py.brokers.redis.lua import LIBRARY
from machinery_py.connections.redis.scripts import PRELUDE, Script

# In: queue, limit. Out: msgpack of (priority, note or nil, body), the next first.
PENDING = Script(
    LIBRARY
    + r"""
local q, limit, found = unpacked[1], unpacked[2], {}
local function list(key, level)
  if #found < limit then
    for _, body in ipairs(call('LRANGE', key, 0, limit - #found - 1)) do
      local noted = call('HGET', q[2] .. 'a', redis.sha1hex(body))
      found[#found + 1] = '\147' .. cmsgpack.pack(level) .. bin(noted) .. bin(body)
    end
  end
end
for _, level in ipairs(call('ZREVRANGE', q[2] .. 'l', 0, -1)) do list(q[2] .. 'p:' .. level, tonumber(level)) end
list(q[1], 0)
return arr(found)
"""
)

# In: queues, limit. Out: msgpack of (queue or "" for Go's set, due in µs, member).
LATE = Script(
    LIBRARY
    + r"""
local queues, limit, found = unpacked[1], unpacked[2], {}
local function look(key, name, unit)
  local rows = call('ZRANGE', key, 0, limit - 1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local due = math.floor(tonumber(rows[i + 1]) / unit + 0.5)
    found[#found + 1] = '\147' .. bin(name) .. cmsgpack.pack(due) .. bin(rows[i])
  end
end
look(DELAYED, '', 1000)
for _, q in ipairs(queues) do look(q[2] .. 'z', q[1], 1) end
return arr(found)
"""
)

# In: now, queues. Out: for each (waiting, running, parked, dead, when its oldest was put or "", 1 if it is paused);
# connections to be woken.
STATS = Script(
    LIBRARY
    + r"""
local now, queues, lines, rung = now_of(unpacked[1]), unpacked[2], {}, {}
key_type(DELAYED, 'zset')
for _, q in ipairs(queues) do
  usable(q, {})
  counter(q[2] .. 'c')
  key_type(q[2] .. 'o', 'list')
  for _, level in ipairs(call('ZRANGE', q[2] .. 'l', 0, -1)) do key_type(q[2] .. 'p:' .. level, 'list') end
  for _, session in ipairs(call('ZRANGE', q[2] .. 's', 0, -1)) do key_type(q[2] .. 'f:' .. session, 'hash') end
end
for _, q in ipairs(queues) do
  local p = q[2]
  parked(q, now, rung)
  local plain = call('LLEN', q[1])
  local waiting, running = plain, 0
  for _, level in ipairs(call('ZRANGE', p .. 'l', 0, -1)) do waiting = waiting + call('LLEN', p .. 'p:' .. level) end
  for _, session in ipairs(call('ZRANGE', p .. 's', 0, -1)) do running = running + call('HLEN', p .. 'f:' .. session) end
  local oldest = ''
  if plain > 0 then
    local place = tonumber(call('GET', p .. 'c') or '0') - plain
    for _, mark in ipairs(call('LRANGE', p .. 'o', 0, -1)) do
      local at, when = string.match(mark, '(%-?%d+) (%d+)')
      if oldest == '' or tonumber(at) <= place then oldest = when else break end
    end
  end
  lines[#lines + 1] = {waiting, running, call('ZCARD', p .. 'z'), call('HLEN', p .. 'd'), oldest,
    call('EXISTS', p .. 'u')}
end
return {lines, rung}
"""
)

# In: at which place of Go's delayed set to begin, the last due first, and how many to look at. Out: how many there were; their
# routing keys as they stand in the JSON, and how many each. From the end: what is moved to its queue meanwhile shifts no other.
LATE_NAMES = Script(
    PRELUDE
    + r"""
local start, size, counts, names = unpacked[1], unpacked[2], {}, {}
key_type('delayed_tasks', 'zset')
local bodies = call('ZREVRANGE', 'delayed_tasks', start, start + size - 1)
for _, body in ipairs(bodies) do
  local name = string.match(body, '"RoutingKey":("[^"]*")') or ''
  counts[name] = (counts[name] or 0) + 1
end
for name, count in pairs(counts) do names[#names + 1] = {name, count} end
return {#bodies, names}
"""
)

# In: queues. Out: for each (session, beat in µs, how many it holds, record or nil).
WORKERS = Script(
    LIBRARY
    + r"""
local lines = {}
for i, q in ipairs(unpacked[1]) do
  lines[i] = {}
  local found = call('ZRANGE', q[2] .. 's', 0, -1, 'WITHSCORES')
  for j = 1, #found, 2 do
    table.insert(lines[i], {found[j], int(tonumber(found[j + 1])), call('HLEN', q[2] .. 'f:' .. found[j]),
      call('GET', q[2] .. 'b:' .. found[j])})
  end
end
return lines
"""
)

# In: queue, members of Go's delayed set that are its. Out: how many messages are gone.
PURGE = Script(
    LIBRARY
    + r"""
local q, members, gone = unpacked[1], unpacked[2], 0
key_type(q[1], 'list')
if #members > 0 then key_type(DELAYED, 'zset') end
key_type(q[2] .. 'z', 'zset')
for _, level in ipairs(call('ZRANGE', q[2] .. 'l', 0, -1)) do key_type(q[2] .. 'p:' .. level, 'list') end
for _, level in ipairs(call('ZRANGE', q[2] .. 'l', 0, -1)) do
  gone = gone + call('LLEN', q[2] .. 'p:' .. level)
  call('DEL', q[2] .. 'p:' .. level)
end
gone = gone + call('LLEN', q[1]) + call('ZCARD', q[2] .. 'z')
call('DEL', q[1], q[2] .. 'l', q[2] .. 'z', q[2] .. 'a', q[2] .. 'o')
for _, member in ipairs(members) do gone = gone + call('ZREM', DELAYED, member) end
return gone
"""
)

# In: queue. Out: connections to be woken: who sleeps at the queue's list is to find another bed.
PAUSE = Script(
    LIBRARY
    + r"""
local q, rung = unpacked[1], {}
key_type('mpy:queues', 'set')
key_type(q[2] .. 'u', 'set')
ring(q, 'v', 100000, rung)  -- first: after a removal a full Redis lets the rest pass
call('SADD', 'mpy:queues', q[1])
call('SADD', q[2] .. 'u', '')
return rung
"""
)

# In: queue. Out: connections to be woken.
RESUME = Script(
    LIBRARY
    + r"""
local q, rung = unpacked[1], {}
key_type(q[2] .. 'v', 'set')
for _, number in ipairs(call('SMEMBERS', q[2] .. 'u')) do
  if number ~= '' then rung[#rung + 1] = number end
end
call('DEL', q[2] .. 'u')
ring(q, 'v', 100000, rung)
return rung
"""
)

# In: queues, limit. Out: for each the newest dead letters (id, letter).
DEAD = Script(
    PRELUDE
    + r"""
local queues, limit, found = unpacked[1], unpacked[2], {}
for i, q in ipairs(queues) do
  found[i] = {}
  for _, id in ipairs(call('ZREVRANGE', q[2] .. 'e', 0, limit - 1)) do
    table.insert(found[i], {id, call('HGET', q[2] .. 'd', id)})
  end
end
return found
"""
)

# In: now, queue, head of the dead letter, label, body. Out: nothing. A message that was never on a list becomes a dead letter.
BURY = Script(
    LIBRARY
    + r"""
local text, q, head, label, body = unpack(unpacked)
key_type(q[2] .. 'd', 'hash')
key_type(q[2] .. 'e', 'zset')
counter(q[2] .. 'n')
try('SADD', 'mpy:queues', q[1])
bury(q, wrap(0, 0, 0, 0, 0, label, body), now_of(text), head)
"""
)

# In: (queue, id) of each. Out: the letter of each, or nothing.
TAKE_DEAD = Script(
    PRELUDE
    + r"""
local found = {}
for _, one in ipairs(unpacked[1]) do
  key_type(one[1][2] .. 'd', 'hash')
  key_type(one[1][2] .. 'e', 'zset')
end
for i, one in ipairs(unpacked[1]) do
  local p, id = one[1][2], one[2]
  found[i] = call('HGET', p .. 'd', id)
  if found[i] then
    call('HDEL', p .. 'd', id)
    call('ZREM', p .. 'e', id)
  end
end
return found
"""
)
