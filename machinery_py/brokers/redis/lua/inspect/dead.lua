-- In: queues, limit. Out: for each the newest dead letters, each as its id and then when it died, in µs.
--! include connections/redis/lua/prelude.lua

local queues, limit, found = unpacked[1], unpacked[2], {}
for i, q in ipairs(queues) do found[i] = call('ZREVRANGE', q[2] .. 'e', 0, limit - 1, 'WITHSCORES') end
return found
