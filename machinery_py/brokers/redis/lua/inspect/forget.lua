-- In: queue. Out: 1 if nothing is left of it but what is counted anew; 0 if something waits, runs, is
-- dead or paused there, or a worker serves it: then nothing was changed.
--! include connections/redis/lua/prelude.lua

local q = unpacked[1]
local p = q[2]
key_type('mpy:queues', 'set')
if call('EXISTS', q[1], p .. 'l', p .. 'z', p .. 'd', p .. 's', p .. 'u') > 0 then return 0 end
for _, session in ipairs(call('ZRANGE', p .. 't', 0, -1)) do
  if call('EXISTS', p .. 'i:' .. session, p .. 'f:' .. session) > 0 then return 0 end
end
for _, name in ipairs({'n', 'c', 'x', 'a', 'o', 't', 'e', 'v', 'w', 'life'}) do call('DEL', p .. name) end
call('SREM', 'mpy:queues', q[1])
return 1
