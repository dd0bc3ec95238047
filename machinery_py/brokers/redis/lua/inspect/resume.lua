-- In: queue. Out: connections to be woken.
--! include brokers/redis/lua/messages.lua

local q, to_wake = unpacked[1], {}
key_type(q[2] .. 'v', 'set')
for _, number in ipairs(call('SMEMBERS', q[2] .. 'u')) do
  if number ~= '' then to_wake[#to_wake + 1] = number end
end
call('DEL', q[2] .. 'u')
wake(q, 'v', 100000, to_wake)
return to_wake
