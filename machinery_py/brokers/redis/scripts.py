"""The scripts of the Redis broker. The keys are described in docs/explanation/redis-protocol.md.

Each takes one msgpack array, and says here what is in it (In) and what it returns (Out). `now` is "" for the server's clock,
else microseconds. Queues and messages are as lua.py says.
"""

from __future__ import annotations

from machinery_py.brokers.redis.lua import LIBRARY
from machinery_py.connections.redis.scripts import PRELUDE, Script

TOKEN_LIFE = 600  # seconds; longer than anybody repeats a submission
GRAVE = 86_400_000_000  # µs that a condemned session is looked at
CLOSED = 60_000_000  # µs that a closed one is

# In: now, token, queues, messages. Out: 0 if the token was used before, else the connections to be woken.
PUT = Script(
    LIBRARY
    + rf"""
local text, token, queues, messages = unpack(unpacked)
local now, rung = now_of(text), {{}}
check(queues, messages, now)
if token ~= '' and not call('SET', 'mpy:p:' .. token, '1', 'NX', 'EX', {TOKEN_LIFE}) then return 0 end
put(queues, messages, now, rung)
return rung
"""
)

# In: now, session, record, queues. Out: nothing.
REGISTER = Script(
    LIBRARY
    + r"""
local text, session, record, queues = unpack(unpacked)
local now = now_of(text)
key_type('mpy:queues', 'set')
for _, q in ipairs(queues) do
  if pcall(key_type, q[2] .. 's', 'zset') then
    call('SADD', 'mpy:queues', q[1])
    call('SET', q[2] .. 'b:' .. session, record)
    call('ZADD', q[2] .. 's', now, session)
  end
end
"""
)

# In: now, session, queues. Out: 1, or 0 if the session was given up in one of its queues. The score is removed first, so
# that a full Redis lets the beat pass. A queue whose registry is something else is left out, here and in all that follows.
BEAT = Script(
    LIBRARY
    + r"""
local text, session, queues = unpack(unpacked)
local now = now_of(text)
local sound = {}
for _, q in ipairs(queues) do
  local fine, beat = pcall(call, 'ZSCORE', q[2] .. 's', session)
  if fine and not beat then return 0 end
  if fine then sound[#sound + 1] = q end
end
for _, q in ipairs(sound) do
  call('ZREM', q[2] .. 's', session)
  call('ZADD', q[2] .. 's', now, session)
end
return 1
"""
)

# In: now, session, queues, limit, number of this claim, numbers of lost ones, connection, true if it will sleep, true if it may
# be among the sleepers, true if it sleeps at none of these queues.
# Out: what is left of the session (1, or 0 if it was given up); µs until something is due (-1: nothing is); how many tasks
# are revoked; connections to be woken; msgpack of (queue, first receipt, fence, strikes, parks, priority, bodies), in which the
# receipts of the bodies follow each other; which queue a sleeper is to block at, from 1 on (0: all are paused or spoilt); texts
# that name keys under which something else lies. A queue with such a key is left alone, and the others are claimed from.
CLAIM = Script(
    LIBRARY
    + r"""
local text, session, queues, limit, claim, lost, number, will_sleep, noted, apart = unpack(unpacked)
local now, rung, found, runs, count, with_notes, places, problems = now_of(text), {}, {}, 0, 0, {}, {}, {}
local function reply() return '\221' .. struct.pack('>I4', runs) .. table.concat(found) end
local function tell(index, receipt, fence, strikes, parks, level, bodies)
  found[#found + 1] = '\151' .. cmsgpack.pack(places[index] - 1, receipt, fence, strikes, parks, level)
    .. '\221' .. struct.pack('>I4', #bodies)
  for _, body in ipairs(bodies) do
    found[#found + 1] = bin_head(body)
    found[#found + 1] = body
  end
  runs, count = runs + 1, count + #bodies
end
local function fly(index, q, level, bodies)
  if #bodies == 0 then return end
  local first = call('INCRBY', q[2] .. 'n', #bodies) - #bodies
  local a, entries, plain = q[2] .. 'a', {}, wrap(claim, level, 1, 0, 0, '', '')
  local noted = with_notes[index]
  for i, body in ipairs(bodies) do
    local note = noted and call('HGET', a, redis.sha1hex(body))
    entries[2 * i - 1] = int(first + i)
    if note then
      local fence, strikes, parks, at = string.match(note, '^(%d+) (%d+) (%d+)\n()')
      call('HDEL', a, redis.sha1hex(body))
      fence, strikes, parks = fence + 1, tonumber(strikes), tonumber(parks)
      entries[2 * i] = wrap(claim, level, fence, strikes, parks, string.sub(note, at), body)
      tell(index, first + i, fence, strikes, parks, level, {body})
    else
      entries[2 * i] = plain .. body
      if noted then tell(index, first + i, 1, 0, 0, level, {body}) end
    end
  end
  if not noted then tell(index, first + 1, 1, 0, 0, level, bodies) end
  rows('HSET', q[2] .. 'f:' .. session, entries)
end
local alive, arrived, levels, firsts, stopped, bed = true, {}, {}, {}, {}, 0
local function expect(kind, ...)
  for _, key in ipairs({...}) do
    local fine, problem = pcall(key_type, key, kind)
    if not fine then problems[#problems + 1] = words(problem) end
  end
end
local function sight(index, q)
  local p = q[2]
  key_type(q[1], 'list')
  counter(p .. 'n')
  with_notes[index] = key_type(p .. 'a', 'hash')
  local beat = call('ZSCORE', p .. 's', session)
  arrived[index] = call('LRANGE', p .. 'i:' .. session, 0, -1)
  levels[index] = call('ZREVRANGE', p .. 'l', 0, -1)
  for _, level in ipairs(levels[index]) do key_type(p .. 'p:' .. level, 'list') end
  firsts[index] = call('ZRANGE', p .. 'z', 0, 0, 'WITHSCORES')
  stopped[index] = key_type(p .. 'u', 'set')
  if #arrived[index] > 0 and (stopped[index] or not beat) then usable(q, {}) end
  alive = beat and alive
end
if not first_due() then expect('zset', DELAYED) end
local revoked = try('ZCARD', 'mpy:revoked')
if not revoked then
  expect('zset', 'mpy:revoked')
  revoked = 1  -- as far as we know
end
local all = queues
queues = {}
for place, q in ipairs(all) do
  local index = #queues + 1
  local fine, problem = pcall(sight, index, q)
  if fine then
    queues[index], places[index] = q, place
    -- From a paused queue nothing is taken, and nobody sleeps at its list; resuming it wakes those who noted themselves.
    if bed == 0 and not stopped[index] then bed = index end
  else
    local before = #problems
    expect('zset', q[2] .. 's', q[2] .. 'l', q[2] .. 'z')
    if #problems == before then problems[before + 1] = words(problem) end
  end
end
for _, q in ipairs(queues) do
  if noted then
    try('SREM', q[2] .. 'v', number)
    if apart or #queues > 1 then try('SREM', q[2] .. 'w', number) end  -- the order may have been another
  end
end
local function return_arrivals(q, bodies)
  for i = #bodies, 1, -1 do give(q, 0, {bodies[i]}, true, now, rung) end
end
if not alive then
  for index, q in ipairs(queues) do
    call('DEL', q[2] .. 'i:' .. session)
    return_arrivals(q, arrived[index])
  end
  return {0, -1, 1, rung, reply(), 0, problems}
end
for index, q in ipairs(queues) do
  if #lost > 0 then
    local flight, again = q[2] .. 'f:' .. session, {}
    local all = call('HGETALL', flight)
    for i = 1, #all, 2 do
      local m = unwrap(all[i + 1])
      for _, one in ipairs(lost) do
        if m.number == int(one) then again[#again + 1] = {tonumber(all[i]), m} end
      end
    end
    table.sort(again, function(a, b) return a[1] < b[1] end)
    for _, one in ipairs(again) do
      local m = one[2]
      call('HSET', flight, int(one[1]), wrap(claim, m.level, m.fence, m.strikes, m.parks, m.label, m.body))
      tell(index, one[1], m.fence, m.strikes, m.parks, m.level, {m.body})
    end
  end
  if #arrived[index] > 0 then
    call('DEL', q[2] .. 'i:' .. session)
    if stopped[index] then return_arrivals(q, arrived[index]) else fly(index, q, 0, arrived[index]) end
  end
end
for index, q in ipairs(queues) do
  if parked(q, now, rung, firsts[index]) then
    levels[index], with_notes[index] = call('ZREVRANGE', q[2] .. 'l', 0, -1), true
  end
  if count < limit and not stopped[index] then
    for _, level in ipairs(levels[index]) do
      if count < limit then
        local list = q[2] .. 'p:' .. level
        fly(index, q, tonumber(level), call('LPOP', list, limit - count) or {})
        if call('EXISTS', list) == 0 then call('ZREM', q[2] .. 'l', level) end
      end
    end
    if count < limit then fly(index, q, 0, call('LPOP', q[1], limit - count) or {}) end
  end
end
if will_sleep and count == 0 then
  for index, q in ipairs(queues) do
    try('SADD', q[2] .. (stopped[index] and 'u' or 'v'), number)
    if (apart or index ~= bed) and not stopped[index] then try('SADD', q[2] .. 'w', number) end
  end
end
return {1, due_in(queues, now), revoked, rung, reply(), places[bed] or 0, problems}
"""
)

# In: now, session, queues, disposals (index of the queue, receipt, fate, due, head of the dead letter).
# Out: a letter each, s or f; connections to be woken.
DISPOSE = Script(
    LIBRARY
    + r"""
local text, session, queues, disposals = unpack(unpacked)
local now, rung, backs, verdicts, raws, taken = now_of(text), {}, {}, {}, {}, {}
for i, d in ipairs(disposals) do
  local q = queues[d[1] + 1]
  local flight = q[2] .. 'f:' .. session
  local raw = not taken[flight .. d[2]] and call('HGET', flight, d[2])
  if raw and not can_end(q, d[3], raw) then raw = false end
  verdicts[i], raws[i] = raw and 's' or 'f', raw
  if raw then taken[flight .. d[2]] = true end
end
for i, d in ipairs(disposals) do
  local q = queues[d[1] + 1]
  if raws[i] then end_delivery(q, q[2] .. 'f:' .. session, d[2], raws[i], d[3], d[4], d[5], backs, now, rung) end
end
give_backs(backs, now, rung)
return {table.concat(verdicts), rung}
"""
)

# In: session, prefix of the queue, receipt. Out: nothing. Notes that this delivery is being run; what is over is forgotten.
BEGIN = Script(
    PRELUDE
    + r"""
local session, prefix, receipt = unpack(unpacked)
local flight, noted = prefix .. 'f:' .. session, prefix .. 'r:' .. session
for _, one in ipairs(call('SMEMBERS', noted)) do
  if call('HEXISTS', flight, one) == 0 then call('SREM', noted, one) end
end
if call('HEXISTS', flight, receipt) == 1 then call('SADD', noted, receipt) end
"""
)

# In: session, deliveries (prefix, receipt). Out: 1 or 0 for each.
HOLDS = Script(
    PRELUDE
    + r"""
local session, held = unpacked[1], {}
for i, d in ipairs(unpacked[2]) do held[i] = call('HEXISTS', d[1] .. 'f:' .. session, d[2]) end
return held
"""
)

# In: now, session, queues, the beat that was seen or "", for each queue the receipts that get a strike (false: what the session
# has noted), µs of its tombstone. Out: -1 if the session has beaten since or is gone, else how many messages it held; connections
# to be woken. A queue with something else under one of its keys stays as it is.
CONDEMN = Script(
    LIBRARY
    + r"""
local text, session, queues, seen, began, grave = unpack(unpacked)
local now, rung, held, sound = now_of(text), {}, 0, {}
local there = false
local function sight(index, q)
  local beat = call('ZSCORE', q[2] .. 's', session)
  there = there or beat
  if beat and seen ~= '' and int(tonumber(beat)) ~= seen then return true end
  key_type(q[1], 'list')
  key_type(q[2] .. 't', 'zset')
  can_empty(q, session)
  sound[#sound + 1] = index
end
for index, q in ipairs(queues) do
  local _, lives = pcall(sight, index, q)
  if lives == true then return {-1, rung} end
end
if not there then return {-1, rung} end
for _, index in ipairs(sound) do
  local q = queues[index]
  call('ZREM', q[2] .. 's', session)
  call('DEL', q[2] .. 'b:' .. session)
  held = held + empty(q, session, began and began[index], now, rung)
  call('ZADD', q[2] .. 't', now + grave, session)
end
return {held, rung}
"""
)

# In: now, queues, lease in µs. Out: µs until something is due (-1); late sessions (queue, session, beat); all sessions
# (queue, session); connections to be woken.
LOOK = Script(
    LIBRARY
    + r"""
local text, queues, lease = unpack(unpacked)
local now, rung, late, all, sound = now_of(text), {}, {}, {}, {}
local function read(q)
  return {z = call('ZRANGE', q[2] .. 'z', 0, 0, 'WITHSCORES'), s = call('ZRANGE', q[2] .. 's', 0, -1, 'WITHSCORES'),
          t = call('ZRANGE', q[2] .. 't', 0, -1)}
end
first_due()
for _, q in ipairs(queues) do
  -- Where somebody keeps something else under one of its keys, the other queues are still looked after.
  local fine, found = pcall(read, q)
  if fine then
    sound[#sound + 1] = q
    parked(q, now, rung, found.z)
    for i = 1, #found.s, 2 do
      local session, beat = found.s[i], tonumber(found.s[i + 1])
      all[#all + 1] = {q[1], session}
      if now - beat > lease then late[#late + 1] = {q[1], session, int(beat)} end
    end
    local emptied = not spoilt(q)
    for _, session in ipairs(emptied and found.t or {}) do
      if call('EXISTS', q[2] .. 'i:' .. session, q[2] .. 'f:' .. session) > 0 then
        if pcall(can_empty, q, session) then empty(q, session, false, now, rung) else emptied = false end
      end
    end
    if emptied then call('ZREMRANGEBYSCORE', q[2] .. 't', '-inf', now) end
  end
end
return {due_in(sound, now), late, all, rung}
"""
)

# In: now, limit. Out: bodies that are due in Go's set, the first due first.
DUE = Script(
    LIBRARY
    + r"""
key_type(DELAYED, 'zset')
return call('ZRANGEBYSCORE', DELAYED, '-inf', int(now_of(unpacked[1])) .. '000', 'LIMIT', 0, unpacked[2])
"""
)

# In: now, queues, messages whose bodies are members of Go's set. Out: connections to be woken. Each is taken out by one mover.
MOVE = Script(
    LIBRARY
    + r"""
local text, queues, messages = unpack(unpacked)
local now, rung, ours = now_of(text), {}, {}
check(queues, messages, now)
for _, m in ipairs(messages) do
  if call('ZREM', DELAYED, m[6]) == 1 then ours[#ours + 1] = m end
end
put(queues, ours, now, rung)
return rung
"""
)

# In: now, queue, member of Go's set, head of a dead letter. Out: 1 if it has gone to the dead letters of that queue.
BURY = Script(
    LIBRARY
    + r"""
local text, q, body, head = unpack(unpacked)
can_bury(q)
if call('ZREM', DELAYED, body) == 0 then return 0 end
bury(q, wrap(0, 0, 0, 0, 0, '', body), now_of(text), head)
return 1
"""
)
