-- In: now, seconds that finished states are kept, seconds of others. Out: nothing.
--! include connections/redis/lua/prelude.lua

local prefix = string.sub(KEYS[1], 1, -2)
local now = now_of(unpacked[1])
key_type(prefix .. 'open', 'zset')
call('ZREMRANGEBYSCORE', prefix .. 'done', '-inf', now - unpacked[2] * 1000000)
call('ZREMRANGEBYSCORE', prefix .. 'open', '-inf', now - unpacked[3] * 1000000)
