-- In: name, token, ms. Out: the fence, or nothing if somebody else has the name. May be carried out
-- twice.
--! include connections/redis/lua/prelude.lua

local key, token, ms = 'mpy:lock:{' .. unpacked[1] .. '}', unpacked[2], unpacked[3]
local held = call('GET', key)
if held then
  local owner, fence = string.match(held, '^(%S+) (%d+)$')
  if owner == token then return tonumber(fence) end
  return false
end
local fence = call('INCR', 'mpy:fence')
call('SET', key, token .. ' ' .. int(fence), 'PX', ms)
return fence
