"""The scripts of the Redis backend. The keys are described in docs/explanation/redis-protocol.md.

Each takes one msgpack array, and says here what is in it (In) and what it returns (Out). `now` is "" for the server's clock,
else microseconds. Changes are as lua.py says.
"""

from __future__ import annotations

from machinery_py.backends.redis.lua import CHORD_LIFE, LIBRARY, NAMES, RATES_LIFE
from machinery_py.connections.redis.scripts import PRELUDE, Script, filled

PATIENCE = 8  # looks at an incomplete group; from then on their pauses do not grow
LOOKS = 20  # groups that are looked at in one step, for expiry

# In: now, seconds that finished states are kept, C, S. Out: a letter each: s(ettled), a(lready), f(enced).
APPLY = Script(
    PRELUDE
    + LIBRARY
    + filled(
        r"""
local text, expire
text, expire, C, S = unpack(unpacked)
local now, changes, verdicts, plans = now_of(text), {}, {}, {}
for c = 1, #C, $CHANGE do changes[#changes + 1] = c end
listable(changes)
look_at(changes)
for i, c in ipairs(changes) do verdicts[i], plans[i] = decide(c) end
for i, c in ipairs(changes) do
  if plans[i] then commit(c, plans[i], now, expire) end
end
note_states(now)
return table.concat(verdicts)
""",
        **NAMES,
    )
)

# In: (UUID, run) of each delivery. Out: for each (epoch, 1 if its run is over, outbox or "").
BEGIN = Script(
    PRELUDE
    + LIBRARY
    + filled(
        r"""
local begun, uuids = {}, {}
for i, one in ipairs(unpacked[1]) do uuids[i] = one[1] end
look(uuids)
for i, one in ipairs(unpacked[1]) do
  local uuid, run = one[1], one[2]
  local row = read(uuid)
  local final = row.word == 'SUCCESS' or row.word == 'FAILURE'
  if final or (row.word and (row.run > run or (row.run == run and row.word == 'RETRY'))) then
    begun[i] = {tonumber(row.epoch), 1, call('GET', 'mpy:o:{' .. uuid .. '}') or ''}
  else
    local epoch = int(row.epoch + 1)
    local rest = row.kept and string.match(row.kept, '^%d+\n%d+\n([^\n]*\n.*)$') or '\n\n\n\n\n'
    call('SET', row.m, int(row.run) .. '\n' .. epoch .. '\n' .. rest, 'EX', math.max($LONG, call('TTL', row.m)))
    known[uuid] = nil
    begun[i] = {tonumber(epoch), 0, ''}
  end
end
return begun
""",
        **NAMES,
    )
)

# In: UUIDs. Out: msgpack of (document or nil, companion or nil), for each.
STATES = Script(
    PRELUDE
    + LIBRARY
    + r"""
local found = {}
for i, uuid in ipairs(unpacked[1]) do
  local kept = call('MGET', doc_key(uuid), companion(uuid))
  found[i] = '\146' .. bin(kept[1]) .. bin(kept[2])
end
return arr(found)
"""
)

# In: UUIDs. Out: the mark of each, or "".
MARKS = Script(
    PRELUDE
    + LIBRARY
    + r"""
local found = {}
for i, uuid in ipairs(unpacked[1]) do found[i] = read(uuid).mark end
return found
"""
)

# In: limit. Out: (group, callback, failed member or ""); texts that name keys of groups under which something else lies: these
# groups are left out.
READY = Script(
    PRELUDE
    + LIBRARY
    + r"""
local limit, found, spoilt, at = unpacked[1], {}, {}, 0
key_type('mpy:ready', 'zset')
repeat
  local uuids = call('ZRANGE', 'mpy:ready', at, at + limit - 1)
  for _, uuid in ipairs(uuids) do
    local g = group_keys(uuid)
    local kept = try('HMGET', g, 'callback', 'failed')
    if not kept then
      spoilt[#spoilt + 1] = select(2, pcall(key_type, g, 'hash'))
    elseif #found < limit then
      found[#found + 1] = {uuid, kept[1] or '', kept[2] or ''}
    end
  end
  at = at + limit
until #uuids < limit or #found == limit
return {found, spoilt}
"""
)

# In: now, limit. Out: (group, total, callback) of incomplete groups whose time to be looked at has come; the next is later.
# One with something else under its key is left out, and keeps no other from being looked at.
PARTIAL = Script(
    PRELUDE
    + LIBRARY
    + filled(
        r"""
local now, found = now_of(unpacked[1]), {}
key_type('mpy:partial', 'zset')
for _, uuid in ipairs(call('ZRANGEBYSCORE', 'mpy:partial', '-inf', now, 'LIMIT', 0, unpacked[2])) do
  local g = group_keys(uuid)
  local kept = try('HMGET', g, 'total', 'callback')
  if kept and kept[2] then
    local looks = call('HINCRBY', g, 'looks', 1)
    call('ZADD', 'mpy:partial', int(now + $LEFT * math.min(looks, $LOOKS)), uuid)
    found[#found + 1] = {uuid, tonumber(kept[1]), kept[2]}
  else
    call('ZREM', 'mpy:partial', uuid)
  end
end
return found
""",
        LOOKS=PATIENCE,
        **NAMES,
    )
)

# In: now, limit, µs of age. Out: (key, bodies) of outboxes that are older.
UNSENT = Script(
    PRELUDE
    + r"""
local text, limit, age = unpack(unpacked)
local found = {}
for i, key in ipairs(call('ZRANGEBYSCORE', 'mpy:outbox', '-inf', now_of(text) - age, 'LIMIT', 0, limit)) do
  found[i] = {key, call('GET', 'mpy:o:{' .. key .. '}') or ''}
end
return found
"""
)

# In: (key, outbox that was sent). Out: nothing. Another one is a later one.
CLEAR = Script(
    PRELUDE
    + r"""
key_type('mpy:outbox', 'zset')
for _, one in ipairs(unpacked[1]) do key_type('mpy:o:{' .. one[1] .. '}', 'string') end
for _, one in ipairs(unpacked[1]) do
  local name = 'mpy:o:{' .. one[1] .. '}'
  local kept = call('GET', name)
  if kept == one[2] then call('DEL', name) end
  if not kept or kept == one[2] then call('ZREM', 'mpy:outbox', one[1]) end
end
"""
)

# In: keys of the sets to be read, from which µs, how many. Out: (UUID, µs), the newest first in each set.
NEWEST = Script(
    PRELUDE
    + r"""
local found = {}
for _, key in ipairs(unpacked[1]) do
  local rows = call('ZREVRANGEBYSCORE', key, '+inf', unpacked[2], 'WITHSCORES', 'LIMIT', unpacked[3], unpacked[4])
  for i = 1, #rows, 2 do found[#found + 1] = {rows[i], int(tonumber(rows[i + 1]))} end
end
return found
"""
)

# In: set, from which µs down ("+inf": the newest), how many of that µs to skip, down to which µs, how many to look at, how many
# to find, state or "", name as JSON or "". Out: how many were looked at; the first two for the next call; the µs of each that
# was found; msgpack of (document, companion) of each. The filter may let pass too much, never too little.
FIND = Script(
    PRELUDE
    + LIBRARY
    + r"""
local set, high, skip, low, size, limit, word, name = unpack(unpacked)
local listed = call('ZREVRANGEBYSCORE', set, high, low, 'WITHSCORES', 'LIMIT', skip, size)
local looked, times, found = 0, {}, {}
local function fits(doc)
  if word ~= '' and not string.find(doc, '"State":"' .. word .. '"', 1, true) then return false end
  if name == '' then return true end
  local _, at = string.find(doc, '"TaskName":', 1, true)
  return at and string.sub(doc, at + 1, at + #name) == name
end
while 2 * looked < #listed and #found < limit do
  local keys, theirs = {}, {}
  for i = 2 * looked + 1, math.min(2 * looked + 200, #listed), 2 do keys[#keys + 1] = doc_key(listed[i]) end
  for i, doc in ipairs(call('MGET', unpack(keys))) do
    if doc and fits(doc) then
      local row = 2 * (looked + i) - 1
      theirs[#theirs + 1] = companion(listed[row])
      times[#times + 1] = int(tonumber(listed[row + 1]))
      found[#found + 1] = '\146' .. bin(doc)
    end
  end
  for i, ours in ipairs(#theirs > 0 and call('MGET', unpack(theirs)) or {}) do
    local place = #found - #theirs + i
    found[place] = found[place] .. bin(ours)
  end
  looked = looked + #keys
end
local last, same = looked > 0 and int(tonumber(listed[2 * looked])) or high, 0
for i = 2 * looked, 2, -2 do
  if int(tonumber(listed[i])) ~= last then break end
  same = same + 1
end
return {looked, last, last == high and skip + same or same, times, arr(found)}
"""
)

# In: now, from which second. Out: (state and queue, how many).
RATES = Script(
    PRELUDE
    + rf"""
local last, found = math.floor(now_of(unpacked[1]) / 1000000), {{}}
for second = math.max(unpacked[2], last - {RATES_LIFE}), last do
  local rows = call('HGETALL', 'mpy:rate:' .. int(second))
  for i = 1, #rows, 2 do found[#found + 1] = {{rows[i], tonumber(rows[i + 1])}} end
end
return found
"""
)

# In: now, seconds that it is remembered, UUIDs. Out: nothing.
REVOKE = Script(
    PRELUDE
    + r"""
key_type('mpy:revoked', 'zset')
local until_ = int(now_of(unpacked[1]) + unpacked[2] * 1000000)
for _, uuid in ipairs(unpacked[3]) do call('ZADD', 'mpy:revoked', until_, uuid) end
"""
)

# In: UUIDs. Out: those that are revoked.
REVOKED = Script(
    PRELUDE
    + r"""
local found = {}
if not key_type('mpy:revoked', 'zset') then return found end
for _, uuid in ipairs(unpacked[1]) do
  if call('ZSCORE', 'mpy:revoked', uuid) then found[#found + 1] = uuid end
end
return found
"""
)

# In: UUIDs of tasks, of groups. Out: nothing.
FORGET = Script(
    PRELUDE
    + LIBRARY
    + r"""
look(unpacked[1])
for _, uuid in ipairs(unpacked[2]) do group_doc(uuid) end
for _, name in ipairs({'open', 'done', 'ready', 'partial', 'groups'}) do key_type('mpy:' .. name, 'zset') end
for _, uuid in ipairs(unpacked[1]) do
  call('DEL', doc_key(uuid), companion(uuid))
  call('ZREM', 'mpy:open', uuid)
  call('ZREM', 'mpy:done', uuid)
end
for _, uuid in ipairs(unpacked[2]) do
  call('DEL', doc_key(uuid), group_keys(uuid))
  call('ZREM', 'mpy:ready', uuid)
  call('ZREM', 'mpy:partial', uuid)
  call('ZREM', 'mpy:groups', uuid)
end
"""
)

# In: now, seconds that finished states are kept. Out: how many groups were looked at. What is kept under a group's UUID and is no
# document is left alone; MGET says that it is missing.
TEND = Script(
    PRELUDE
    + LIBRARY
    + rf"""
local text, expire = unpack(unpacked)
local now = now_of(text)
for _, name in ipairs({{'ready', 'partial', 'groups'}}) do key_type('mpy:' .. name, 'zset') end
try('ZREMRANGEBYSCORE', 'mpy:revoked', '-inf', now)
try('ZREMRANGEBYSCORE', 'mpy:done', '-inf', now - expire * 1000000)
try('ZREMRANGEBYSCORE', 'mpy:open', '-inf', now - 2 * {CHORD_LIFE} * 1000000)
local due = call('ZRANGEBYSCORE', 'mpy:groups', '-inf', now, 'LIMIT', 0, {LOOKS})
for _, uuid in ipairs(due) do
  local g, h = group_keys(uuid)
  local doc, alive = call('MGET', doc_key(uuid))[1], call('ZSCORE', 'mpy:ready', uuid)
  if doc and not is_group(uuid, doc) then doc = false end
  if doc and not alive then
    -- Our own document of a group holds names only: no number can suffer.
    local read, group = pcall(cjson.decode, doc)
    for _, member in ipairs(read and type(group.TaskUUIDs) == 'table' and group.TaskUUIDs or {{}}) do
      if call('EXISTS', doc_key(member)) == 1 then alive = true break end
    end
  end
  if alive then
    call('ZADD', 'mpy:groups', now + expire * 1000000, uuid)
    if doc then call('EXPIRE', doc_key(uuid), {CHORD_LIFE}) end
  else
    call('DEL', g, h)
    if doc then call('DEL', doc_key(uuid)) end
    call('ZREM', 'mpy:groups', uuid)
    call('ZREM', 'mpy:partial', uuid)
  end
end
return #due
"""
)
