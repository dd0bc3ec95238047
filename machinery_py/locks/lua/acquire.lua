-- In: now, name, token, ms. Out: the fence, or nothing if somebody else has the name. May be carried out
-- twice.
--! include connections/redis/lua/fences.lua

local text, name, token, ms = unpack(unpacked)
local key = 'mpy:lock:{' .. name .. '}'
local held = call('GET', key)
if held then
  local owner, fence = string.match(held, '^(%S+) (%d+)$')
  if owner == token then return tonumber(fence) end
  return false
end
local fence = fences('mpy:fence', 1, now_of(text))
call('SET', key, token .. ' ' .. int(fence), 'PX', ms)
return fence
