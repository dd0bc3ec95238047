-- In: (key, outbox that was sent). Out: nothing. Another one is a later one.
--! include connections/redis/lua/prelude.lua

key_type('mpy:outbox', 'zset')
for _, one in ipairs(unpacked[1]) do key_type('mpy:o:{' .. one[1] .. '}', 'string') end
for _, one in ipairs(unpacked[1]) do
  local name = 'mpy:o:{' .. one[1] .. '}'
  local kept = call('GET', name)
  if kept == one[2] then call('DEL', name) end
  if not kept or kept == one[2] then call('ZREM', 'mpy:outbox', one[1]) end
end
