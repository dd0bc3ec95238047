-- In: (queue, id) of each. Out: the letter of each, or nothing.
--! include connections/redis/lua/prelude.lua

local found = {}
for _, one in ipairs(unpacked[1]) do
  key_type(one[1][2] .. 'd', 'hash')
  key_type(one[1][2] .. 'e', 'zset')
end
for i, one in ipairs(unpacked[1]) do
  local p, id = one[1][2], one[2]
  found[i] = call('HGET', p .. 'd', id)
  if found[i] then
    call('HDEL', p .. 'd', id)
    call('ZREM', p .. 'e', id)
  end
end
return found
