-- fences(key, count, now): the first of so many fences (fences.py); the others follow it. Raises
-- nothing: where the key holds another type, the time alone is the fence, and `false` comes behind it.
--! include connections/redis/lua/prelude.lua

local function fences(key, count, now)
  local last = try('INCRBY', key, count)
  local first = last and last - count + 1 or now
  local is_ours = last or try('GET', key)  -- a text that is no number is put right
  if last and first >= now or now >= $LATEST or not is_ours then return first, last end
  try('SET', key, int(now + count - 1))
  return now, last
end
