"""The scripts of the backend in a Redis Cluster, each within one slot. The steps are in docs/explanation/redis-cluster.md.

Each takes one msgpack array, and says here what is in it (In) and what it returns (Out). Changes are as lua.py says; UUIDs
stand as `redis_slots.quoted` writes them. How a state is decided and written is lua.py's.
"""

from __future__ import annotations

from machinery_py.backends.redis.lua import LIBRARY, NAMES, RATES_LIFE
from machinery_py.connections.redis.scripts import PRELUDE, Script, filled

NOTED_FOR = (
    30_000_000  # µs from the note of a record to the record; the servers' clocks differ by less
)

# What was written, for the listings.
_WRITTEN = r"""
local function written()
  local names = {}
  for name, count in pairs(rates) do names[#names + 1] = name end
  return {done, open, names}
end
"""

# Go's mutex is in a slot of its own: whoever wants to fire a group has flagged its document first, and looked at the mutex then.
# The flag is Go's, in JSON that Go never writes, so that what Go writes over it is told from it.
_FLAG = '"ChordTriggered": true'
_MAY_FIRE = rf"""
may_fire = function(uuid)
  key_type((group_keys(uuid)), 'hash')
  local doc = group_doc(uuid)
  if (not doc and call('EXISTS', (group_keys(uuid))) == 0) or has_fired(uuid) then return false end
  if not doc or call('HGET', (group_keys(uuid)), 'failed') then return true end
  return string.find(doc, '{_FLAG}', 1, true) or not string.find(doc, '"ChordTriggered":', 1, true)
end
"""

# In: group. Out: 1 if Go may be at it as well, which its mutex tells; 2 if Go has settled it, or is at it; else 0.
FLAG = Script(
    PRELUDE
    + LIBRARY
    + rf"""
local uuid = unpacked[1]
local doc = group_doc(uuid)
if not doc or has_fired(uuid) or call('HGET', (group_keys(uuid)), 'failed') then return 0 end
if string.find(doc, '{_FLAG}', 1, true) then return 1 end
local from, to = string.find(doc, '"ChordTriggered":false', 1, true)
if not from then return string.find(doc, '"ChordTriggered":true', 1, true) and 2 or 0 end
call('SET', doc_key(uuid), string.sub(doc, 1, from - 1) .. '{_FLAG}' .. string.sub(doc, to + 1), 'KEEPTTL')
return 1
"""
)

# In: now, seconds, C of one change (its own states, no groups, arrivals or outbox), S, record or "", whether results are held,
# µs of the note of the record. Out: s, a, f or l (the note is too old: nothing was done); finished UUIDs, others, state and
# queue of the finished.
CHANGE = Script(
    PRELUDE
    + LIBRARY
    + _MAY_FIRE
    + _WRITTEN
    + filled(
        r"""
local text, expire, record, held, noted
text, expire, C, S, record, held, noted = unpack(unpacked)
local now, key, fires = now_of(text), C[1 + $KEY], C[1 + $FIRES]
if record ~= '' and now > noted + $NOTED then return {'l'} end
look_at({1})
local verdict, plan = decide(1)
if verdict ~= 's' then return {verdict} end
if record ~= '' then call('SET', 'mpy:o:{' .. key .. '}', record) end
if fires ~= '' then
  local g, h = group_keys(fires)
  call('HSET', g, 'fired', 1)
  local doc = call('GET', doc_key(fires))
  if doc then call('SET', doc_key(fires), triggered(doc), 'KEEPTTL') end
  call('EXPIRE', g, expire)
  call('EXPIRE', h, expire)
end
-- The listings, from which a replay would take it, are elsewhere.
for _, row in ipairs(plan) do write(row, false, held) end
return {verdict, written()}
""",
        NOTED=NOTED_FOR,
        **NAMES,
    )
)

# In: group, document. Out: nothing.
GROUP = Script(
    PRELUDE
    + LIBRARY
    + filled(
        r"""
local uuid, doc = unpack(unpacked)
key_type((group_keys(uuid)), 'hash')
if not group_doc(uuid) and is_queue(uuid) then error('WRONGTYPE ' .. uuid .. ' is a queue, not a group') end
if call('HGET', (group_keys(uuid)), 'fired') then doc = triggered(doc) end
call('SET', doc_key(uuid), doc, 'NX', 'EX', $LONG)
""",
        **NAMES,
    )
)

# In: arrival. Out: 0, 1 if its group is ready to be fired, 2 if it was.
ARRIVE = Script(
    PRELUDE
    + LIBRARY
    + filled(
        r"""
local a = unpacked[1]
local g, h = group_keys(a[1])
key_type(g, 'hash')
key_type(h, 'set')
if call('SADD', h, a[2]) == 1 then
  call('HSET', g, 'total', a[3], 'callback', a[5])
  if not a[4] then call('HSETNX', g, 'failed', a[2]) end
end
local failed, fired = call('HGET', g, 'failed'), call('HGET', g, 'fired')
if fired then return 2 end
if a[5] ~= '' and (failed or (a[3] > 0 and call('SCARD', h) >= a[3])) then
  call('PERSIST', g)
  call('PERSIST', h)
  return 1
end
call('EXPIRE', g, $LONG)
call('EXPIRE', h, $LONG)
return 0
""",
        **NAMES,
    )
)

# In: group. Out: callback, failed member, fired, or nil each; the members that are in, if it was fired; texts that name keys
# under which something else lies.
LOOK_AT = Script(
    PRELUDE
    + LIBRARY
    + r"""
local g, h = group_keys(unpacked[1])
local fine, problem = pcall(key_type, g, 'hash')
if not fine then return {false, false, false, {}, {words(problem)}} end
local kept = call('HMGET', g, 'callback', 'failed', 'fired')
return {kept[1], kept[2], kept[3], kept[3] and call('SMEMBERS', h) or {}, {}}
"""
)

# In: group. Out: nothing. What somebody else keeps under its UUID stays.
FORGET_GROUP = Script(
    PRELUDE
    + LIBRARY
    + r"""
local uuid = unpacked[1]
local doc = try('GET', doc_key(uuid))
if doc and is_group(uuid, doc) then call('DEL', doc_key(uuid)) end
call('DEL', group_keys(uuid))
"""
)

# In: UUID of a task. Out: nothing.
FORGET_TASK = Script(
    PRELUDE
    + LIBRARY
    + r"""
local uuid = unpacked[1]
look({uuid})
call('DEL', doc_key(uuid), companion(uuid))
"""
)

# In: UUID, seconds. Out: nothing. The document expires by then.
LOOSEN = Script(
    PRELUDE
    + LIBRARY
    + r"""
for _, key in ipairs({doc_key(unpacked[1]), companion(unpacked[1])}) do
  if call('TTL', key) > unpacked[2] then call('EXPIRE', key, unpacked[2]) end
end
"""
)

# In: key of the record, outbox that was sent. Out: nothing. A record with another outbox is a later one.
SENT = Script(
    PRELUDE
    + r"""
local name, size = unpacked[1], #unpacked[2]
local record = call('GET', name)
if record and string.sub(record, 1, size) == unpacked[2] then call('DEL', name) end
"""
)

# In: now, name, expected, body, key of the record, record or "", µs of its note. Out: s; f if the schedule holds something else
# ("" is none), l if the note is too old: nothing was done.
AMEND = Script(
    PRELUDE
    + filled(
        r"""
local prefix = string.sub(KEYS[1], 1, -2)
local text, name, expected, body, key, record, noted = unpack(unpacked)
local all = prefix .. 'all'
if record ~= '' and now_of(text) > noted + $NOTED then return 'l' end
if (call('HGET', all, name) or '') ~= expected then return 'f' end
counter(prefix .. 'n')
if record ~= '' then call('SET', key, record) end
if body == '' then call('HDEL', all, name) else call('HSET', all, name, body) end
call('INCR', prefix .. 'n')
return 's'
""",
        NOTED=NOTED_FOR,
    )
)

# A claim is kept behind the key of the record of what was sent with it, and the length of that, in four bytes.

# In: key of the claim. Out: what it holds, or nil; the record of what was sent with it, if that is not done with, or nil.
CLAIM = Script(
    PRELUDE
    + r"""
local kept = call('GET', unpacked[1])
if not kept then return {false, false} end
local size = struct.unpack('>I4', kept)
return {string.sub(kept, 5 + size), size > 0 and call('GET', string.sub(kept, 5, 4 + size))}
"""
)

# In: now, key of the claim, expected, body, life, key of the record, record or "", µs of its note. Out: as of AMEND.
AMEND_CLAIM = Script(
    PRELUDE
    + filled(
        r"""
local text, claim, expected, body, life, key, record, noted = unpack(unpacked)
if record ~= '' and now_of(text) > noted + $NOTED then return 'l' end
local kept, head, holds = call('GET', claim), '\0\0\0\0', ''
if kept then
  local size = struct.unpack('>I4', kept)
  head, holds = string.sub(kept, 1, 4 + size), string.sub(kept, 5 + size)
end
if holds ~= expected then return 'f' end
if record ~= '' then
  call('SET', key, record)
  head = struct.pack('>I4', #key) .. key
end
if body == '' then call('DEL', claim) else call('SET', claim, head .. body, 'EX', int(life)) end
return 's'
""",
        NOTED=NOTED_FOR,
    )
)

# In: key of the claim, body. Out: nothing.
RELEASE = Script(
    PRELUDE
    + r"""
local kept = call('GET', unpacked[1])
if kept and string.sub(kept, 5 + struct.unpack('>I4', kept)) == unpacked[2] then call('DEL', unpacked[1]) end
"""
)

# In: now, version known to the caller. Out: now, version, and names and bodies in turn, unless the version is known.
SCHEDULES = Script(
    PRELUDE
    + r"""
local prefix = string.sub(KEYS[1], 1, -2)
local version, now = call('GET', prefix .. 'n') or '0', int(now_of(unpacked[1]))
if version == unpacked[2] then return {now, version} end
return {now, version, call('HGETALL', prefix .. 'all')}
"""
)

# The listings: they are in shards, whose prefix is that of the guard.

# In: now, keys. Out: µs of each note, later than those of an earlier one. Each has a record, soon.
NOTE = Script(
    PRELUDE
    + r"""
local prefix = string.sub(KEYS[1], 1, -2)
local now, stamps = now_of(unpacked[1]), {}
for i, key in ipairs(unpacked[2]) do
  local stamp = int(math.max(now, tonumber(call('ZSCORE', prefix .. 'outbox', key) or '0') + 1))
  call('ZADD', prefix .. 'outbox', stamp, key)
  stamps[i] = stamp
end
return stamps
"""
)

# In: (key, µs of the note). Out: nothing. The records are gone; one that was noted since then stays.
DROP = Script(
    PRELUDE
    + r"""
local prefix = string.sub(KEYS[1], 1, -2)
for _, one in ipairs(unpacked[1]) do
  if call('ZSCORE', prefix .. 'outbox', one[1]) == one[2] then call('ZREM', prefix .. 'outbox', one[1]) end
end
"""
)

# In: now, limit, µs of age. Out: now; (key, µs of the note), the oldest first.
RECORDS = Script(
    PRELUDE
    + r"""
local prefix = string.sub(KEYS[1], 1, -2)
local now = now_of(unpacked[1])
return {int(now), call('ZRANGEBYSCORE', prefix .. 'outbox', '-inf', now - unpacked[3], 'WITHSCORES', 'LIMIT', 0, unpacked[2])}
"""
)

# In: now, finished UUIDs, what state and queue each finished with, others, whether they may have been finished. Out: nothing.
LIST = Script(
    PRELUDE
    + rf"""
local prefix = string.sub(KEYS[1], 1, -2)
local text, done, names, open, replayed = unpack(unpacked)
local now = now_of(text)
local stamp, rate = int(now), prefix .. 'rate:' .. int(math.floor(now / 1000000))
key_type(prefix .. 'open', 'zset')
key_type(prefix .. 'done', 'zset')
key_type(rate, 'hash')
for i, uuid in ipairs(done) do
  call('ZREM', prefix .. 'open', uuid)
  if call('ZADD', prefix .. 'done', stamp, uuid) == 1 then
    call('HINCRBY', rate, names[i], 1)
    call('EXPIRE', rate, {RATES_LIFE})
  end
end
for _, uuid in ipairs(open) do
  if replayed then call('ZREM', prefix .. 'done', uuid) end
  if not call('ZSCORE', prefix .. 'done', uuid) then call('ZADD', prefix .. 'open', stamp, uuid) end
end
"""
)

# In: now, from which second. Out: (state and queue, how many).
RATES = Script(
    PRELUDE
    + rf"""
local prefix = string.sub(KEYS[1], 1, -2)
local last, found = math.floor(now_of(unpacked[1]) / 1000000), {{}}
for second = math.max(unpacked[2], last - {RATES_LIFE}), last do
  local rows = call('HGETALL', prefix .. 'rate:' .. int(second))
  for i = 1, #rows, 2 do found[#found + 1] = {{rows[i], tonumber(rows[i + 1])}} end
end
return found
"""
)

# In: now, seconds that finished states are kept, seconds of others. Out: nothing.
EXPIRE = Script(
    PRELUDE
    + r"""
local prefix = string.sub(KEYS[1], 1, -2)
local now = now_of(unpacked[1])
key_type(prefix .. 'open', 'zset')
call('ZREMRANGEBYSCORE', prefix .. 'done', '-inf', now - unpacked[2] * 1000000)
call('ZREMRANGEBYSCORE', prefix .. 'open', '-inf', now - unpacked[3] * 1000000)
"""
)
