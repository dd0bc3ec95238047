-- In: (key, µs of the note). Out: nothing. The records are gone; one that was noted since then
-- stays.
--! include connections/redis/lua/prelude.lua

local prefix = string.sub(KEYS[1], 1, -2)
for _, one in ipairs(unpacked[1]) do
  if call('ZSCORE', prefix .. 'outbox', one[1]) == one[2] then call('ZREM', prefix .. 'outbox', one[1]) end
end
