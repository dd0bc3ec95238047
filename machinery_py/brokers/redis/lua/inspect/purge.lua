-- In: queue, members of Go's delayed set that are its. Out: how many messages are gone: none of a
-- list that is no queue of ours.
--! include brokers/redis/lua/messages.lua

local q, members, gone = unpacked[1], unpacked[2], 0
key_type(q[1], 'list')
if call('SISMEMBER', 'mpy:queues', q[1]) == 0 then return 0 end
if #members > 0 then key_type(DELAYED, 'zset') end
key_type(q[2] .. 'z', 'zset')
for _, level in ipairs(call('ZRANGE', q[2] .. 'l', 0, -1)) do
  key_type(q[2] .. 'p:' .. level, level == 'fair' and 'zset' or 'list')
end
for _, level in ipairs(call('ZRANGE', q[2] .. 'l', 0, -1)) do
  gone = gone + call(level == 'fair' and 'ZCARD' or 'LLEN', q[2] .. 'p:' .. level)
  call('DEL', q[2] .. 'p:' .. level)
end
for _, lane in ipairs(call('ZRANGE', q[2] .. 'x', 0, -1)) do
  -- The turn that is served stays: what is in flight may come back with an older one.
  if string.find(lane, ':', 1, true) then call('ZREM', q[2] .. 'x', lane) end
end
gone = gone + call('LLEN', q[1]) + call('ZCARD', q[2] .. 'z')
call('DEL', q[1], q[2] .. 'l', q[2] .. 'z', q[2] .. 'a', q[2] .. 'o')
for _, member in ipairs(members) do gone = gone + call('ZREM', DELAYED, member) end
return gone
