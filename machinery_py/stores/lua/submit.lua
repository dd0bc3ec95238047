-- In: now, seconds that finished states are kept, token, queues, messages, C of nothing or one
-- change, S. Out: 0 if the token was used before, else connections to be woken.
--! include brokers/redis/lua/putting.lua
--! include backends/redis/lua/changes.lua

local text, expire, token, queues, messages
text, expire, token, queues, messages, C, S = unpack(unpacked)
local now, to_wake = now_of(text), {}
check(queues, messages, now)
local _, plan = decide_first()
if token ~= '' and not call('SET', 'mpy:p:' .. token, '1', 'NX', 'EX', '$TOKEN_LIFE') then return 0 end
put(queues, messages, now, to_wake)
if plan then commit(1, plan, now, expire) end
note_states(now)
return to_wake
