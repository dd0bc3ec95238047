-- In: now, queues, how many of Go's delayed set to look at. Out: for each (waiting, running, parked,
-- dead, when its oldest was put or came due or "", 1 if it is paused), or nothing if something else lies
-- under one of its keys; `late_names` from the start, in the same step: a retry that goes from one to
-- the other is counted once; texts that name such keys.
-- What is due counts as waiting, and stays in our delayed set: a claim gives it the place that it has a
-- right to.
--! include brokers/redis/lua/messages.lua
--! include brokers/redis/lua/room.lua
--! include brokers/redis/lua/inspect/late_count.lua

local now, queues, lines, problems = now_of(unpacked[1]), unpacked[2], {}, {}
key_type(DELAYED, 'zset')
local function line_of(q)
  local p = q[2]
  usable(q, {})
  counter(p .. 'c')
  key_type(p .. 'o', 'list')
  key_type(p .. 's', 'zset')
  for _, level in ipairs(call('ZRANGE', p .. 'l', 0, -1)) do
    key_type(p .. 'p:' .. level, level == 'fair' and 'zset' or 'list')
  end
  for _, session in ipairs(call('ZRANGE', p .. 's', 0, -1)) do key_type(p .. 'f:' .. session, 'hash') end
  local plain = call('LLEN', q[1])
  local waiting, running, oldest = waiting_in(q), 0, ''
  for _, session in ipairs(call('ZRANGE', p .. 's', 0, -1)) do running = running + call('HLEN', p .. 'f:' .. session) end
  if plain > 0 then
    local place = tonumber(call('GET', p .. 'c') or '0') - plain
    for _, mark in ipairs(call('LRANGE', p .. 'o', 0, -1)) do
      local at, when = string.match(mark, '(%-?%d+) (%d+)')
      if oldest == '' or tonumber(at) <= place then oldest = when else break end
    end
  end
  local first, due = call('ZRANGE', p .. 'z', 0, 0, 'WITHSCORES')[2], 0
  if first and tonumber(first) <= now then
    due = call('ZCOUNT', p .. 'z', '-inf', int(now))
    if oldest == '' or tonumber(first) < tonumber(oldest) then oldest = int(tonumber(first)) end
  end
  return {waiting + due, running, call('ZCARD', p .. 'z') - due, call('HLEN', p .. 'd'), oldest, call('EXISTS', p .. 'u')}
end
for i, q in ipairs(queues) do
  local fine, line = pcall(line_of, q)
  lines[i] = fine and line or {}
  if not fine then problems[#problems + 1] = words(line) end
end
return {lines, late_names(0, unpacked[3], now), problems}
