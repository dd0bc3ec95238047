-- In: queue. Out: clients to be woken: clients blocked at the queue's list are to block at
-- another.
--! include brokers/redis/lua/messages.lua

local q, to_wake = unpacked[1], {}
key_type('mpy:queues', 'set')
key_type(q[2] .. 'u', 'set')
wake(q, 'v', 100000, to_wake)  -- first: after a removal a full Redis lets the rest pass
call('SADD', 'mpy:queues', q[1])
call('SADD', q[2] .. 'u', '')
return to_wake
