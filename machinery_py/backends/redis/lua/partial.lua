-- In: now, limit. Out: (group, total, callback) of incomplete groups whose time to be looked at has
-- come, none behind $BYTES of callbacks; the next is later. One with something else under its key is left out, and keeps no other
-- from being looked at.
--! include backends/redis/lua/changes.lua

local now, found, size = now_of(unpacked[1]), {}, 0
key_type('mpy:partial', 'zset')
for _, uuid in ipairs(call('ZRANGEBYSCORE', 'mpy:partial', '-inf', now, 'LIMIT', 0, unpacked[2])) do
  if size >= $BYTES then break end
  local g = group_keys(uuid)
  local kept = try('HMGET', g, 'total', 'callback')
  if kept and kept[2] then
    local looks = call('HINCRBY', g, 'looks', 1)
    call('ZADD', 'mpy:partial', int(now + $LEFT * math.min(looks, $PATIENCE)), uuid)
    found[#found + 1] = {uuid, tonumber(kept[1]), kept[2]}
    size = size + #kept[2]
  else
    call('ZREM', 'mpy:partial', uuid)
  end
end
return found
