-- In: queue. Out: connections to be woken: who sleeps at the queue's list is to find another bed.
--! include brokers/redis/lua/messages.lua

local q, rung = unpacked[1], {}
key_type('mpy:queues', 'set')
key_type(q[2] .. 'u', 'set')
ring(q, 'v', 100000, rung)  -- first: after a removal a full Redis lets the rest pass
call('SADD', 'mpy:queues', q[1])
call('SADD', q[2] .. 'u', '')
return rung
