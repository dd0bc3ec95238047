-- In: (queue, id) of each. Out: the letter, or nothing, of each of the first that are no larger than
-- $BYTES, at least of one. These are removed.
--! include connections/redis/lua/prelude.lua

local found, size = {}, 0
for _, one in ipairs(unpacked[1]) do
  key_type(one[1][2] .. 'd', 'hash')
  key_type(one[1][2] .. 'e', 'zset')
end
for i, one in ipairs(unpacked[1]) do
  local p, id = one[1][2], one[2]
  size = size + call('HSTRLEN', p .. 'd', id)
  if size > $BYTES and i > 1 then break end
  found[i] = call('HGET', p .. 'd', id)
  if found[i] then
    call('HDEL', p .. 'd', id)
    call('ZREM', p .. 'e', id)
  end
end
return found
