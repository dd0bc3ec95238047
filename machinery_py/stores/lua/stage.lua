-- In: now, seconds that finished states are kept, token, number of the step, queues, messages, C of
-- nothing or one change, S. Out: 0 if the token was used before, else 1. Raises what `submit` would
-- raise; keeps this argument, and carries nothing out.
--! include brokers/redis/lua/putting.lua
--! include backends/redis/lua/changes.lua
--! include stores/lua/staged.lua

local text, expire, token, number, queues, messages
text, expire, token, number, queues, messages, C, S = unpack(unpacked)
if call('EXISTS', 'mpy:p:' .. token) == 1 then return 0 end
check(queues, messages, now_of(text))
if C[1] then look_at({1}) end
call('HSET', staged(token), number, ARGV[1])
call('EXPIRE', staged(token), '$TOKEN_LIFE')
return 1
