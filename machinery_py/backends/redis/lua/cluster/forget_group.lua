-- In: group. Out: nothing. What somebody else keeps under its UUID stays.
--! include backends/redis/lua/changes.lua

local uuid = unpacked[1]
local doc = try('GET', doc_key(uuid))
if doc and is_group(uuid, doc) then call('DEL', doc_key(uuid)) end
call('DEL', group_keys(uuid))
