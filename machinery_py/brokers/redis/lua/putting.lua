-- How a message comes to its list.
--
-- A queue is (name, prefix of our keys). A message is (index of its queue, priority, due in µs or
-- 0, label, parks, body); a label is what only we can say of bytes that are no signature. Bodies
-- are never decoded.
--
-- give: puts bodies on a queue's list, at its head or tail, and marks when; the first that a queue
-- ever gets, that it is there. What comes back to an empty list has a mark only if none is left.
-- check: raises, before anything is written, if a key that these messages come to is something
-- else.
-- put: stores messages; returns connections of blocked clients that must be woken.
-- waiting_in: how many messages wait in a queue.
-- full: of limits (index of a queue, how many may wait there at most), the first that is passed, as
-- a text: index and how many wait; nothing if all hold, or the token was used: then it is a repeat.
--! include connections/redis/lua/prelude.lua

local DELAYED = '$DELAYED'
local function list_of(q, level)
  if level > 0 then return q[2] .. 'p:' .. int(level) end
  return q[1]
end
local function wake(q, set, count, to_wake)
  for _, number in ipairs(try('SPOP', q[2] .. set, count) or {}) do to_wake[#to_wake + 1] = number end
end
local function give(q, level, bodies, at_head, now, to_wake)
  local list, p = list_of(q, level), q[2]
  local length
  for i = 1, #bodies, 2000 do
    length = call(at_head and 'LPUSH' or 'RPUSH', list, unpack(bodies, i, math.min(i + 1999, #bodies)))
  end
  if level > 0 then
    try('SADD', 'mpy:queues', q[1])
    call('ZADD', p .. 'l', level, int(level))
    wake(q, 'v', #bodies, to_wake)
  elseif not at_head then
    local place, last = (try('INCRBY', p .. 'c', #bodies) or #bodies) - #bodies, nil
    if place == 0 then try('SADD', 'mpy:queues', q[1]) end
    if length == #bodies then call('DEL', p .. 'o') else last = try('LINDEX', p .. 'o', -1) end
    if not last or now - tonumber(string.match(last, ' (%d+)') or 0) >= $EVERY then
      if (try('RPUSH', p .. 'o', int(place) .. ' ' .. int(now)) or 0) > $MARKS then call('LPOP', p .. 'o') end
    end
  elseif length == #bodies and call('EXISTS', p .. 'o') == 0 then
    try('RPUSH', p .. 'o', int((tonumber(try('GET', p .. 'c') or '') or 0) - length) .. ' ' .. int(now))
  end
  wake(q, 'w', #bodies, to_wake)
end
local function note(q, body, fence, strikes, parks, label)
  if fence > 0 or strikes > 0 or parks > 0 or label ~= '' then
    call('HSET', q[2] .. 'a', redis.sha1hex(body), fence .. ' ' .. strikes .. ' ' .. parks .. '\n' .. label)
  end
end
local function wrap(number, level, fence, strikes, parks, label, body)
  return table.concat({number, level, fence, strikes, parks, #label}, ' ') .. '\n' .. label .. body
end
local function park(q, due, m, to_wake, now)
  local number = int(call('INCR', q[2] .. 'n'))
  call('ZADD', q[2] .. 'z', due, wrap(number, m.level, m.fence, m.strikes, m.parks, m.label, m.body))
  if due < now + 1100000 then wake(q, 'v', 1, to_wake) end
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
local function waiting_in(q)
  local waiting = call('LLEN', q[1])
  for _, level in ipairs(call('ZRANGE', q[2] .. 'l', 0, -1)) do waiting = waiting + call('LLEN', q[2] .. 'p:' .. level) end
  return waiting
end
local function full(queues, limits, token)
  if #limits == 0 or (token ~= '' and call('EXISTS', 'mpy:p:' .. token) == 1) then return end
  for _, one in ipairs(limits) do
    local waiting = waiting_in(queues[one[1] + 1])
    if waiting > one[2] then return int(one[1]) .. ' ' .. int(waiting) end
  end
end
local function put(queues, messages, now, to_wake)
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
      if due < now + 1100000 then wake(q, 'v', 1, to_wake) end
    else
      try('SADD', 'mpy:queues', q[1])
      park(q, due, {level = level, fence = 0, strikes = 0, parks = parks, label = label, body = body}, to_wake, now)
    end
  end
  for _, one in ipairs(order) do give(one[1], one[2], one[3], false, now, to_wake) end
end
