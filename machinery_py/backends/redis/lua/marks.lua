-- In: UUIDs. Out: the mark of each, or "".
--! include backends/redis/lua/changes.lua

local found = {}
for i, uuid in ipairs(unpacked[1]) do found[i] = read(uuid).mark end
return found
