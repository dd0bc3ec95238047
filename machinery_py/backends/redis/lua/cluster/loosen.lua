-- In: UUID, seconds that finished states are kept. Out: nothing. The document expires by then, or
-- when its own time is over.
--! include backends/redis/lua/changes.lua

local life = tonumber(call('MGET', life_key(unpacked[1]))[1] or unpacked[2])
for _, key in ipairs({doc_key(unpacked[1]), companion(unpacked[1])}) do
  if call('TTL', key) > life then call('EXPIRE', key, life) end
end
