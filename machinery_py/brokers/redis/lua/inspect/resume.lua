-- In: queue. Out: connections to be woken.
--! include brokers/redis/lua/messages.lua

local q, rung = unpacked[1], {}
key_type(q[2] .. 'v', 'set')
for _, number in ipairs(call('SMEMBERS', q[2] .. 'u')) do
  if number ~= '' then rung[#rung + 1] = number end
end
call('DEL', q[2] .. 'u')
ring(q, 'v', 100000, rung)
return rung
