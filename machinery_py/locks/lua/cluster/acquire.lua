-- In: now, name, token, ms. Out: the fence, or nothing if somebody else has the name. May be
-- carried out twice. The fence is the time in µs, or one more than the last one: so no count has to
-- be kept for each name that ever was.
--! include connections/redis/lua/prelude.lua

local text, name, token, ms = unpack(unpacked)
local key, last = 'mpy:lock:{' .. name .. '}', 'mpy:fence:{' .. name .. '}'
local held = call('GET', key)
if held then
  local owner, fence = string.match(held, '^(%S+) (%d+)$')
  if owner == token then return tonumber(fence) end
  return false
end
local fence = math.max(now_of(text), tonumber(call('GET', last) or '0') + 1)
call('SET', last, int(fence), 'PX', int(ms + $FENCE_LIFE))
call('SET', key, token .. ' ' .. int(fence), 'PX', ms)
return fence
