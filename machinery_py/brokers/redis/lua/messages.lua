-- How a message leaves its list and comes back. Queues and messages are as putting.lua says.
--
-- back: gives entries of a session to the heads of their lists, in their old order; `guilty` are
-- the receipts that get a strike.
-- empty: gives back what can_empty returned; `began` gets a strike, or if that is false what the
-- session has noted. Of what is left, `began` is noted.
-- spoilt: whether somebody keeps something else under the queue's name.
-- usable: raises, before anything is written, if somebody does so with one of the keys that entries
-- need which come back or wait.
-- can_bury: the same for those that die. can_end: whether this fate can be carried out; if not, the
-- entry stays in flight until its queue is as it should be. can_empty: as usable, for what a session
-- has of a queue; returns what one script gives back of it, the last first: (receipt, entry) of each;
-- and how many are left.
-- parked: brings what is due from our own delayed set to its queue, if that can take it; whether it
-- did. A claim says how many it has room for: of those, what has waited for its turn goes to the head,
-- the first due first. Behind a long queue its turn would pass, while it holds others back. A fair
-- queue has turns of its own. Without room, 100 at most go to the tail: enough to wake workers, whose
-- claims do the rest, and soon worked off by those that come later.
--! include brokers/redis/lua/next_due.lua
--! include brokers/redis/lua/putting.lua

local function back(q, entries, guilty, now, to_wake)
  table.sort(entries, function(a, b) return tonumber(a[1]) > tonumber(b[1]) end)
  for _, entry in ipairs(entries) do
    local m = unwrap(entry[2])
    m.strikes = m.strikes + (guilty[entry[1]] or 0)
    place(q, m, true, now, to_wake)
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
local returned_bytes = 0
local function can_empty(q, session)
  local p = q[2]
  key_type(p .. 'i:' .. session, 'list')
  key_type(p .. 'f:' .. session, 'hash')
  key_type(p .. 'r:' .. session, 'set')
  local receipts, entries, raws = call('HKEYS', p .. 'f:' .. session), {}, {}
  table.sort(receipts, function(a, b) return tonumber(a) > tonumber(b) end)
  for _, receipt in ipairs(receipts) do
    local size = call('HSTRLEN', p .. 'f:' .. session, receipt)
    if returned_bytes > 0 and returned_bytes + size > $BYTES then break end
    raws[#raws + 1] = call('HGET', p .. 'f:' .. session, receipt)
    entries[#entries + 1] = {receipt, raws[#raws]}
    returned_bytes = returned_bytes + size
  end
  usable(q, raws)
  return entries, #receipts - #entries
end
local function empty(q, session, began, now, to_wake, entries, left)
  local flight, arrivals, noted = q[2] .. 'f:' .. session, q[2] .. 'i:' .. session, q[2] .. 'r:' .. session
  local guilty, gone = {}, {}
  while true do
    local body = call('RPOP', arrivals)
    if not body then break end
    give(q, 0, {body}, true, now, to_wake)
  end
  for _, receipt in ipairs(began or call('SMEMBERS', noted)) do guilty[receipt] = 1 end
  if began or left == 0 then call('DEL', noted) end
  if left == 0 then
    call('DEL', flight)
  else
    if began then rows('SADD', noted, began) end
    for i, entry in ipairs(entries) do gone[i] = entry[1] end
    rows('HDEL', flight, gone)
  end
  back(q, entries, guilty, now, to_wake)
  return #entries
end
local function spoilt(q)
  local found = call('TYPE', q[1]).ok
  return found ~= 'none' and found ~= 'list'
end
local function parked(q, now, to_wake, first, room)
  local z = q[2] .. 'z'
  first = first or call('ZRANGE', z, 0, 0, 'WITHSCORES')
  if not first[2] or tonumber(first[2]) > now then
    soonest[z] = first
    return
  end
  local texts = due_in_set(z, int(now), room or 100)
  if not pcall(usable, q, texts) then
    soonest[z] = call('ZRANGEBYSCORE', z, '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    return
  end
  local waited = {}
  for _, text in ipairs(texts) do
    local m = unwrap(text)
    call('ZREM', z, text)
    if room and m.fence > 0 and m.parks == 0 and m.level <= 255 then waited[#waited + 1] = m else place(q, m, false, now, to_wake) end
  end
  for i = #waited, 1, -1 do place(q, waited[i], true, now, to_wake) end
  return #texts > 0
end
local function bury(q, raw, now, head)
  local m = unwrap(raw)
  local id = int(call('INCR', q[2] .. 'n'))
  call('HSET', q[2] .. 'd', id, m.strikes .. ' ' .. int(now) .. ' ' .. #head .. ' ' .. #m.label .. '\n'
    .. head .. m.label .. m.body)
  call('ZADD', q[2] .. 'e', now, id)
end
local function end_delivery(q, flight, number, raw, fate, left, head, backs, now, to_wake)
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
    if left > 0 or fate == 'wait' then
      park(q, now + left, m, to_wake, now)
    else
      place(q, m, false, now, to_wake)
    end
  end
end
local function give_backs(backs, now, to_wake)
  for q, entries in pairs(backs) do
    for _, entry in ipairs(entries) do call('HDEL', entry[3], entry[1]) end
    back(q, entries, {}, now, to_wake)
  end
end
