-- In: at which place of Go's delayed set to begin, the last due first, and how many to look at.
-- Out: how many there were; their routing keys as they stand in the JSON, and how many each. From
-- the end: what is moved to its queue meanwhile shifts no other.
--! include connections/redis/lua/prelude.lua

local start, size, counts, names = unpacked[1], unpacked[2], {}, {}
key_type('delayed_tasks', 'zset')
local bodies = call('ZREVRANGE', 'delayed_tasks', start, start + size - 1)
for _, body in ipairs(bodies) do
  local name = string.match(body, '"RoutingKey":("[^"]*")') or ''
  counts[name] = (counts[name] or 0) + 1
end
for name, count in pairs(counts) do names[#names + 1] = {name, count} end
return {#bodies, names}
