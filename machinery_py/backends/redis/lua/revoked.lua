-- In: UUIDs. Out: those that are revoked.
--! include connections/redis/lua/prelude.lua

local found = {}
if not key_type('mpy:revoked', 'zset') then return found end
for _, uuid in ipairs(unpacked[1]) do
  if call('ZSCORE', 'mpy:revoked', uuid) then found[#found + 1] = uuid end
end
return found
