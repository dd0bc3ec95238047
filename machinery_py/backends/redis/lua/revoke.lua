-- In: now, seconds that it is remembered, UUIDs. Out: nothing.
--! include connections/redis/lua/prelude.lua

key_type('mpy:revoked', 'zset')
local until_ = int(now_of(unpacked[1]) + unpacked[2] * 1000000)
for _, uuid in ipairs(unpacked[3]) do
  if unpacked[2] > 0 then call('ZADD', 'mpy:revoked', until_, uuid) else call('ZREM', 'mpy:revoked', uuid) end
end
