-- In: queue, delayed messages, each with whether it is in our own set, else in Go's. Out: for each
-- whether it was still there, and is gone.
--! include brokers/redis/lua/messages.lua

local q, rows, gone = unpacked[1], unpacked[2], {}
key_type(q[2] .. 'z', 'zset')
key_type(DELAYED, 'zset')
for i, row in ipairs(rows) do gone[i] = call('ZREM', row[1] and q[2] .. 'z' or DELAYED, row[2]) end
return gone
