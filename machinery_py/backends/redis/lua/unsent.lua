-- In: now, limit, µs of age. Out: (key, bodies) of outboxes that are older.
--! include connections/redis/lua/prelude.lua

local text, limit, age = unpack(unpacked)
local found = {}
for i, key in ipairs(call('ZRANGEBYSCORE', 'mpy:outbox', '-inf', now_of(text) - age, 'LIMIT', 0, limit)) do
  found[i] = {key, call('GET', 'mpy:o:{' .. key .. '}') or ''}
end
return found
