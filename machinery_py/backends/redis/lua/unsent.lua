-- In: now, how many to skip, limit, µs of age. Out: (key, bodies) of outboxes that are older; none behind $BYTES of them.
--! include connections/redis/lua/prelude.lua

local text, skip, limit, age = unpack(unpacked)
local found, size = {}, 0
for i, key in ipairs(call('ZRANGEBYSCORE', 'mpy:outbox', '-inf', now_of(text) - age, 'LIMIT', skip, limit)) do
  if size >= $BYTES then break end
  found[i] = {key, call('GET', 'mpy:o:{' .. key .. '}') or ''}
  size = size + #found[i][2]
end
return found
