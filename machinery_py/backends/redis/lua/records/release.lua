-- In: (name, body) of claims. Out: nothing.
--! include connections/redis/lua/prelude.lua

for _, one in ipairs(unpacked[1]) do key_type('mpy:u:' .. one[1], 'string') end
for _, one in ipairs(unpacked[1]) do
  local key = 'mpy:u:' .. one[1]
  if call('GET', key) == one[2] then call('DEL', key) end
end
