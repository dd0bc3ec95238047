"""What the scripts of the Redis broker share: how a message comes to its list, leaves it and comes back.

A queue is (name, prefix of our keys). A message is (index of its queue, priority, due in µs or 0, label, parks, body); a label
is what only we can say of bytes that are no signature. Bodies are never decoded.
"""

from __future__ import annotations

from machinery_py.connections.redis.pool import DELAYED
from machinery_py.connections.redis.scripts import PRELUDE, filled

MARK_EVERY = 250_000  # µs between two notes of when a place of a queue was filled
MARKS = 4096  # of these notes

# give: puts bodies on a queue's list, at its head or tail, and notes when; the first that a queue ever gets, that it is there.
# check: raises, before anything is written, if a key that these messages come to is something else.
# put: stores messages; returns connections of sleepers that must be woken.
PUTTING = PRELUDE + filled(
    r"""
local DELAYED = '$DELAYED'
local function list_of(q, level)
  if level > 0 then return q[2] .. 'p:' .. int(level) end
  return q[1]
end
local function ring(q, set, count, rung)
  for _, number in ipairs(try('SPOP', q[2] .. set, count) or {}) do rung[#rung + 1] = number end
end
local function give(q, level, bodies, at_head, now, rung)
  local list, p = list_of(q, level), q[2]
  local length
  for i = 1, #bodies, 2000 do
    length = call(at_head and 'LPUSH' or 'RPUSH', list, unpack(bodies, i, math.min(i + 1999, #bodies)))
  end
  if level > 0 then
    try('SADD', 'mpy:queues', q[1])
    call('ZADD', p .. 'l', level, int(level))
    ring(q, 'v', #bodies, rung)
  elseif not at_head then
    local place, last = (try('INCRBY', p .. 'c', #bodies) or #bodies) - #bodies, nil
    if place == 0 then try('SADD', 'mpy:queues', q[1]) end
    if length == #bodies then call('DEL', p .. 'o') else last = try('LINDEX', p .. 'o', -1) end
    if not last or now - tonumber(string.match(last, ' (%d+)') or 0) >= $EVERY then
      if (try('RPUSH', p .. 'o', int(place) .. ' ' .. int(now)) or 0) > $MARKS then call('LPOP', p .. 'o') end
    end
  end
  ring(q, 'w', #bodies, rung)
end
local function note(q, body, fence, strikes, parks, label)
  if fence > 0 or strikes > 0 or parks > 0 or label ~= '' then
    call('HSET', q[2] .. 'a', redis.sha1hex(body), fence .. ' ' .. strikes .. ' ' .. parks .. '\n' .. label)
  end
end
local function wrap(number, level, fence, strikes, parks, label, body)
  return table.concat({number, level, fence, strikes, parks, #label}, ' ') .. '\n' .. label .. body
end
local function park(q, due, m, rung, now)
  local number = int(call('INCR', q[2] .. 'n'))
  call('ZADD', q[2] .. 'z', due, wrap(number, m.level, m.fence, m.strikes, m.parks, m.label, m.body))
  if due < now + 1100000 then ring(q, 'v', 1, rung) end
end
local parkable = {}
local function can_give(q, level)
  key_type(list_of(q, level), 'list')
  if level > 0 then key_type(q[2] .. 'l', 'zset') end
end
local function can_park(q)
  if parkable[q] then return end
  counter(q[2] .. 'n')
  key_type(q[2] .. 'z', 'zset')
  parkable[q] = true
end
local function check(queues, messages, now)
  for _, m in ipairs(messages) do
    local q, plain = queues[m[1] + 1], m[4] == '' and m[5] == 0
    if q[1] == '$DELAYED' then error('WRONGTYPE ' .. q[1] .. ' is a set of delayed messages, not a queue') end
    if m[3] <= now then
      can_give(q, m[2])
      if not plain then key_type(q[2] .. 'a', 'hash') end
    else
      key_type(list_of(q, m[2]), 'list')
      key_type('$DELAYED', 'zset')
      if not plain then can_park(q) end
    end
  end
end
local function put(queues, messages, now, rung)
  local order, lists = {}, {}
  for _, m in ipairs(messages) do
    local q, level, due, label, parks, body = queues[m[1] + 1], m[2], m[3], m[4], m[5], m[6]
    if due <= now then
      local list = list_of(q, level)
      if not lists[list] then
        lists[list] = {}
        order[#order + 1] = {q, level, lists[list]}
      end
      table.insert(lists[list], body)
      if label ~= '' or parks > 0 then note(q, body, 0, 0, parks, label) end
    elseif label == '' and parks == 0 then
      try('SADD', 'mpy:queues', q[1])
      call('ZADD', '$DELAYED', int(due) .. '000', body)
      if due < now + 1100000 then ring(q, 'v', 1, rung) end
    else
      try('SADD', 'mpy:queues', q[1])
      park(q, due, {level = level, fence = 0, strikes = 0, parks = parks, label = label, body = body}, rung, now)
    end
  end
  for _, one in ipairs(order) do give(one[1], one[2], one[3], false, now, rung) end
end
""",
    DELAYED=DELAYED,
    EVERY=MARK_EVERY,
    MARKS=MARKS,
)

# unwrap: the parts of an entry of a session, or of a parked message.
# back: gives entries of a session to the heads of their lists, in their old order; `guilty` are the receipts that get a strike.
# empty: gives back all that a session has of a queue; `began` gets a strike, or if that is false what the session has noted.
# spoilt: whether somebody keeps something else under the queue's name.
# usable: raises, before anything is written, if somebody does so with one of the keys that entries need which come back or wait.
# can_bury: the same for those that die. can_end: whether this fate can be carried out; if not, the entry stays in flight until
# its queue is as it should be. can_empty: as usable, for all that a session has of a queue.
# parked: brings what is due from our own delayed set to its queue, if that can take it; whether it did. due_in: µs until the
# next; asks not again what parked saw. first_due: whether Go's delayed set is what it should be; if not, nothing is due in it.
LIBRARY = PUTTING + filled(
    r"""
local function unwrap(text)
  local number, level, fence, strikes, parks, size, at = string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)\n()')
  size = tonumber(size)
  return {number = number, level = tonumber(level), fence = tonumber(fence), strikes = tonumber(strikes),
          parks = tonumber(parks), label = string.sub(text, at, at + size - 1), body = string.sub(text, at + size)}
end
local function back(q, entries, guilty, now, rung)
  table.sort(entries, function(a, b) return tonumber(a[1]) > tonumber(b[1]) end)
  for _, entry in ipairs(entries) do
    local m = unwrap(entry[2])
    give(q, m.level, {m.body}, true, now, rung)
    note(q, m.body, m.fence, m.strikes + (guilty[entry[1]] or 0), m.parks, m.label)
  end
end
local used = {}
local function can_bury(q)
  counter(q[2] .. 'n')
  key_type(q[2] .. 'd', 'hash')
  key_type(q[2] .. 'e', 'zset')
end
local function usable(q, entries)
  local p = q[2]
  if not used[p] then
    can_give(q, 0)
    can_park(q)
    can_bury(q)
    key_type(p .. 'a', 'hash')
    key_type(p .. 'l', 'zset')
    used[p] = true
  end
  for _, text in ipairs(entries) do can_give(q, tonumber(string.match(text, '^%d+ (%d+)'))) end
end
local function can_end(q, fate, raw)
  if fate == 'done' then return true end
  if fate == 'dead' then return (pcall(can_bury, q)) end
  return (pcall(usable, q, {raw}))
end
local function can_empty(q, session)
  local p = q[2]
  key_type(p .. 'i:' .. session, 'list')
  key_type(p .. 'f:' .. session, 'hash')
  key_type(p .. 'r:' .. session, 'set')
  usable(q, call('HVALS', p .. 'f:' .. session))
end
local function empty(q, session, began, now, rung)
  local flight, arrivals, noted = q[2] .. 'f:' .. session, q[2] .. 'i:' .. session, q[2] .. 'r:' .. session
  local entries, guilty = {}, {}
  while true do
    local body = call('RPOP', arrivals)
    if not body then break end
    give(q, 0, {body}, true, now, rung)
  end
  local all = call('HGETALL', flight)
  for i = 1, #all, 2 do entries[#entries + 1] = {all[i], all[i + 1]} end
  for _, receipt in ipairs(began or call('SMEMBERS', noted)) do guilty[receipt] = 1 end
  call('DEL', flight, noted)
  back(q, entries, guilty, now, rung)
  return #entries
end
local soonest = {}
local function first_due()
  local found = try('ZRANGE', '$DELAYED', 0, 0, 'WITHSCORES')
  soonest['$DELAYED'] = found or {}
  return found
end
local function spoilt(q)
  local found = call('TYPE', q[1]).ok
  return found ~= 'none' and found ~= 'list'
end
local function parked(q, now, rung, first)
  local z = q[2] .. 'z'
  first = first or call('ZRANGE', z, 0, 0, 'WITHSCORES')
  if not first[2] or tonumber(first[2]) > now then
    soonest[z] = first
    return
  end
  local texts = call('ZRANGEBYSCORE', z, '-inf', now, 'LIMIT', 0, 2000)
  if not pcall(usable, q, texts) then
    soonest[z] = call('ZRANGEBYSCORE', z, '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    return
  end
  for _, text in ipairs(texts) do
    call('ZREM', z, text)
    local m = unwrap(text)
    give(q, m.level, {m.body}, false, now, rung)
    note(q, m.body, m.fence, m.strikes, m.parks, m.label)
  end
  return true
end
local function due_in(queues, now)
  local least
  local function look(key, unit)
    local first = soonest[key] or call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if first[2] then
      local left = tonumber(first[2]) / unit - now
      if not least or left < least then least = left end
    end
  end
  look('$DELAYED', 1000)
  for _, q in ipairs(queues) do look(q[2] .. 'z', 1) end
  return least and math.max(0, math.floor(least)) or -1
end
local function bury(q, raw, now, head)
  local m = unwrap(raw)
  local id = int(call('INCR', q[2] .. 'n'))
  call('HSET', q[2] .. 'd', id, m.strikes .. ' ' .. int(now) .. ' ' .. #head .. ' ' .. #m.label .. '\n'
    .. head .. m.label .. m.body)
  call('ZADD', q[2] .. 'e', now, id)
end
local function end_delivery(q, flight, number, raw, fate, due, head, backs, now, rung)
  if fate == 'back' then
    backs[q] = backs[q] or {}
    table.insert(backs[q], {number, raw, flight})
    return
  end
  call('HDEL', flight, number)
  if fate == 'dead' then
    bury(q, raw, now, head)
  elseif fate == 'later' or fate == 'wait' then
    local m = unwrap(raw)
    if fate == 'later' then m.parks = m.parks + 1 end
    if due > now then
      park(q, due, m, rung, now)
    else
      give(q, m.level, {m.body}, false, now, rung)
      note(q, m.body, m.fence, m.strikes, m.parks, m.label)
    end
  end
end
local function give_backs(backs, now, rung)
  for q, entries in pairs(backs) do
    for _, entry in ipairs(entries) do call('HDEL', entry[3], entry[1]) end
    back(q, entries, {}, now, rung)
  end
end
""",
    DELAYED=DELAYED,
)
