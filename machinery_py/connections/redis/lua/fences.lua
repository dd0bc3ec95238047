-- fences(key, count, now): the first of so many fences (fences.py); the others follow it. Raises
-- nothing: where the key holds something else, the time alone is the fence.
--! include connections/redis/lua/prelude.lua

local function fences(key, count, now)
  local last = try('INCRBY', key, count)
  local first = last and last - count + 1 or now
  if first >= now or now >= $LATEST then return first end
  try('SET', key, int(now + count - 1))
  return now
end
