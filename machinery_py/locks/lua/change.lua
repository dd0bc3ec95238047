-- In: name, token, ms or 0 to release. Out: 1 or 0.
--! include connections/redis/lua/prelude.lua

local key, token, ms = 'mpy:lock:{' .. unpacked[1] .. '}', unpacked[2], unpacked[3]
local held = call('GET', key)
if not held or string.match(held, '^%S+') ~= token then return 0 end
if ms > 0 then return call('PEXPIRE', key, ms) end
return call('DEL', key)
