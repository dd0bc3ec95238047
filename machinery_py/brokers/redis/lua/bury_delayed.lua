-- In: now, queue, member of Go's set, head of a dead letter. Out: 1 if it has gone to the dead
-- letters of that queue.
--! include brokers/redis/lua/messages.lua

local text, q, body, head = unpack(unpacked)
can_bury(q)
if call('ZREM', DELAYED, body) == 0 then return 0 end
bury(q, wrap(0, 0, 0, 0, 0, '', body), now_of(text), head)
return 1
