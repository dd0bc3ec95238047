-- In: now, limit, µs of age. Out: now; (key, µs of the note), the oldest first.
--! include connections/redis/lua/prelude.lua

local prefix = string.sub(KEYS[1], 1, -2)
local now = now_of(unpacked[1])
return {int(now), call('ZRANGEBYSCORE', prefix .. 'outbox', '-inf', now - unpacked[3], 'WITHSCORES', 'LIMIT', 0, unpacked[2])}
