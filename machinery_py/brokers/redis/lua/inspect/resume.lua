-- In: queue. Out: clients to be woken.
--! include brokers/redis/lua/messages.lua

local q, to_wake = unpacked[1], {}
call('DEL', q[2] .. 'u')
wake(q, 'v', 100000, to_wake)
return to_wake
