-- In: now, queues, how many of Go's delayed set to look at. Out: for each (waiting, running, parked,
-- dead, when its oldest was put or "", 1 if it is paused); connections to be woken; `late_names` from
-- the start, in the same step: a retry that goes from one to the other is counted once.
--! include brokers/redis/lua/messages.lua
--! include brokers/redis/lua/inspect/late_count.lua

local now, queues, lines, to_wake = now_of(unpacked[1]), unpacked[2], {}, {}
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
  parked(q, now, to_wake)
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
return {lines, to_wake, late_names(0, unpacked[3])}
