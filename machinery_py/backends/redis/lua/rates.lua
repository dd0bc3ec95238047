-- In: now, from which second, key of a second without its number. Out: (state and queue, how many).
--! include connections/redis/lua/prelude.lua

local last, found = math.floor(now_of(unpacked[1]) / 1000000), {}
for second = math.max(unpacked[2], last - $RATES), last do
  local rows = call('HGETALL', unpacked[3] .. int(second))
  for i = 1, #rows, 2 do found[#found + 1] = {rows[i], tonumber(rows[i + 1])} end
end
return found
