-- In: UUIDs. Out: msgpack of (document or nil, companion or nil), for each.
--! include backends/redis/lua/changes.lua

local found = {}
for i, uuid in ipairs(unpacked[1]) do
  local kept = call('MGET', doc_key(uuid), companion(uuid))
  found[i] = '\146' .. bin(kept[1]) .. bin(kept[2])
end
return arr(found)
