-- In: key of the record, outbox that was sent. Out: nothing. A record with another outbox is a
-- later one.
--! include connections/redis/lua/prelude.lua

local name, size = unpacked[1], #unpacked[2]
local record = call('GET', name)
if record and string.sub(record, 1, size) == unpacked[2] then call('DEL', name) end
