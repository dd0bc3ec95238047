-- In: session, deliveries (prefix, receipt). Out: 1 or 0 for each.
--! include connections/redis/lua/prelude.lua

local session, held = unpacked[1], {}
for i, d in ipairs(unpacked[2]) do held[i] = call('HEXISTS', d[1] .. 'f:' .. session, d[2]) end
return held
