-- In: keys of the sets to be read, from which µs, how many. Out: (UUID, µs), the newest first in
-- each set.
--! include connections/redis/lua/prelude.lua

local found = {}
for _, key in ipairs(unpacked[1]) do
  local rows = call('ZREVRANGEBYSCORE', key, '+inf', unpacked[2], 'WITHSCORES', 'LIMIT', unpacked[3], unpacked[4])
  for i = 1, #rows, 2 do found[#found + 1] = {rows[i], int(tonumber(rows[i + 1]))} end
end
return found
