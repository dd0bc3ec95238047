-- In: now, limit. Out: now; (body, score) of what is due in Go's set, the first due first; µs until
-- the next one is (-1).
--! include connections/redis/lua/prelude.lua

local now, key, found = now_of(unpacked[1]), '$DELAYED', {}
local rows = redis.call('ZRANGEBYSCORE', key, '-inf', int(now) .. '000', 'WITHSCORES', 'LIMIT', 0, unpacked[2])
for i = 1, #rows, 2 do found[#found + 1] = {rows[i], rows[i + 1]} end
local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
return {int(now), found, first[2] and math.max(0, math.floor(tonumber(first[2]) / 1000 - now)) or -1}
