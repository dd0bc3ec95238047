-- In: UUID of a task. Out: nothing.
--! include backends/redis/lua/changes.lua

local uuid = unpacked[1]
look({uuid})
call('DEL', doc_key(uuid), companion(uuid))
