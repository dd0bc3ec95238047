-- In: session, prefix of the queue, receipt. Out: nothing. Notes that this delivery is being run;
-- what is over is forgotten.
--! include connections/redis/lua/prelude.lua

local session, prefix, receipt = unpack(unpacked)
local flight, noted = prefix .. 'f:' .. session, prefix .. 'r:' .. session
for _, one in ipairs(call('SMEMBERS', noted)) do
  if call('HEXISTS', flight, one) == 0 then call('SREM', noted, one) end
end
if call('HEXISTS', flight, receipt) == 1 then call('SADD', noted, receipt) end
