-- In: (queue, id) of each. Out: the letter of each of the first that are no larger than $BYTES, at least
-- of one; nothing in the place of one that is not there.
--! include connections/redis/lua/prelude.lua

local found, size = {}, 0
for i, one in ipairs(unpacked[1]) do
  local key = one[1][2] .. 'd'
  size = size + call('HSTRLEN', key, one[2])
  if size > $BYTES and i > 1 then break end
  found[i] = call('HGET', key, one[2])
end
return found
