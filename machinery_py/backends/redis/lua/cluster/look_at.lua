-- In: group. Out: callback, failed member, fired, or nil each; the members that are in, if it was
-- fired; texts that name keys under which something else lies.
--! include backends/redis/lua/changes.lua

local g, h = group_keys(unpacked[1])
local fine, problem = pcall(key_type, g, 'hash')
if not fine then return {false, false, false, {}, {words(problem)}} end
local kept = call('HMGET', g, 'callback', 'failed', 'fired')
return {kept[1], kept[2], kept[3], kept[3] and call('SMEMBERS', h) or {}, {}}
