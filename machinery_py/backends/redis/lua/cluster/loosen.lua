-- In: UUID, seconds. Out: nothing. The document expires by then.
--! include backends/redis/lua/changes.lua

for _, key in ipairs({doc_key(unpacked[1]), companion(unpacked[1])}) do
  if call('TTL', key) > unpacked[2] then call('EXPIRE', key, unpacked[2]) end
end
