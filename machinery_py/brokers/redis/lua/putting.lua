-- How a message comes to its list.
--
-- A queue is (name, prefix of our keys). A message is (index of its queue, priority, due in µs or
-- 0, label, parks, body); a label is what only we can say of bytes that are no signature. Bodies
-- are never decoded.
--
-- In a fair queue tenants take turns: a message waits in `p:fair`, scored by its place, and in place of a
-- priority its level is (priority + 1) * FAIR - turn; turn 0: it has none yet. `x` has the last place
-- that each tenant was given (`<priority + 1>:<tenant>`), and the one that is served (`<priority + 1>`).
-- `l` has the member `fair` while there are some. A worker that knows no fair queues expects a list
-- there, and leaves such a queue alone.
-- place: puts a message on its list, or there: at the head with the turn that it has, else with the
-- next one of its tenant. That is none that is over: a tenant waits for one turn of each other at most.
--
-- check: raises, before anything is written, if a key that these messages come to is something
-- else.
-- put: stores messages; returns clients to be woken.
--! include brokers/redis/lua/giving.lua
--! include brokers/redis/lua/entries.lua

local DELAYED = '$DELAYED'
local function note(q, body, fence, strikes, parks, label)
  if fence > 0 or strikes > 0 or parks > 0 or label ~= '' then
    call('HSET', q[2] .. 'a', redis.sha1hex(body), fence .. ' ' .. strikes .. ' ' .. parks .. '\n' .. label)
  end
end
local function place(q, m, at_head, now, to_wake)
  local p, level = q[2], m.level
  if level <= 255 then
    give(q, level, {m.body}, at_head, now, to_wake)
    note(q, m.body, m.fence, m.strikes, m.parks, m.label)
    return
  end
  if not at_head or level % $FAIR == 0 then
    local top = math.ceil(level / $FAIR)
    local lane = int(top) .. ':' .. (m.label ~= '' and cmsgpack.unpack(m.label)[3] or '')
    local first = 1 - top * $FAIR
    local turn = math.max(tonumber(call('ZSCORE', p .. 'x', lane) or first - 1) + 1,
                           tonumber(call('ZSCORE', p .. 'x', int(top)) or first))
    call('ZADD', p .. 'x', turn, lane)
    level = -turn
  end
  local number = string.format('%016d', call('INCR', p .. 'n'))
  call('ZADD', p .. 'p:fair', -level, wrap(number, level, m.fence, m.strikes, m.parks, m.label, m.body))
  call('ZADD', p .. 'l', 0, 'fair')
  try('SADD', 'mpy:queues', q[1])
  wake(q, 'v', 1, to_wake)
end
local function park(q, due, m, to_wake, now)
  local number = int(call('INCR', q[2] .. 'n'))
  call('ZADD', q[2] .. 'z', due, wrap(number, m.level, m.fence, m.strikes, m.parks, m.label, m.body))
  if due < now + $SOON then wake(q, 'v', 1, to_wake) end
end
local parkable = {}
local function can_give(q, level)
  if level > 255 then
    key_type(q[2] .. 'p:fair', 'zset')
    key_type(q[2] .. 'x', 'zset')
    counter(q[2] .. 'n')
  else
    key_type(list_of(q, level), 'list')
  end
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
    local q, plain = queues[m[$PLACE] + 1], m[$LABEL] == '' and m[$PARKS] == 0
    if q[1] == '$DELAYED' then error('WRONGTYPE ' .. q[1] .. ' is a set of delayed messages, not a queue') end
    if m[$DUE] <= now then
      can_give(q, m[$LEVEL])
      if not plain then key_type(q[2] .. 'a', 'hash') end
    else
      key_type(list_of(q, m[$LEVEL]), 'list')
      key_type('$DELAYED', 'zset')
      if not plain then can_park(q) end
    end
  end
end
local function put(queues, messages, now, to_wake)
  local order, lists = {}, {}
  for _, m in ipairs(messages) do
    local q, level, due, label, parks, body = queues[m[$PLACE] + 1], m[$LEVEL], m[$DUE], m[$LABEL], m[$PARKS], m[$BODY]
    if due <= now and level > 255 then
      place(q, {level = level, fence = 0, strikes = 0, parks = parks, label = label, body = body}, false, now, to_wake)
    elseif due <= now then
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
      if due < now + $SOON then wake(q, 'v', 1, to_wake) end
    else
      try('SADD', 'mpy:queues', q[1])
      park(q, due, {level = level, fence = 0, strikes = 0, parks = parks, label = label, body = body}, to_wake, now)
    end
  end
  for _, one in ipairs(order) do give(one[1], one[2], one[3], false, now, to_wake) end
end
