-- In: now, from which second, seconds of a step, key of a second without its number. Out: (second at
-- which a step begins, state and queue, how many).
--! include connections/redis/lua/prelude.lua

local text, first, step, key = unpack(unpacked)
local last, sums, found = math.floor(now_of(text) / 1000000), {}, {}
for second = math.max(first, last - $RATES), last do
  local rows, from = call('HGETALL', key .. int(second)), second - second % step
  sums[from] = sums[from] or {}
  for i = 1, #rows, 2 do sums[from][rows[i]] = (sums[from][rows[i]] or 0) + (tonumber(rows[i + 1]) or 0) end
end
for from, counts in pairs(sums) do
  for name, count in pairs(counts) do found[#found + 1] = {from, name, count} end
end
return found
