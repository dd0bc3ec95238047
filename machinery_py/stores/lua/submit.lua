-- In: now, seconds that finished states are kept, token, limits, queues, messages, C of nothing or
-- one change, S, R. Out: 0 if the token was used before; what `full` says, if a limit is passed;
-- nothing if a rider refuses it; else clients to be woken.
--! include brokers/redis/lua/putting.lua
--! include brokers/redis/lua/room.lua
--! include backends/redis/lua/changes.lua

local text, expire, token, limits, queues, messages
text, expire, token, limits, queues, messages, C, S, R = unpack(unpacked)
local now, to_wake = now_of(text), {}
check(queues, messages, now)
local no_room = full(queues, limits, token)
if no_room then return no_room end
local verdict, plan = decide_first()
if verdict == 'c' then return false end
if token ~= '' and not call('SET', 'mpy:p:' .. token, '1', 'NX', 'EX', '$TOKEN_LIFE') then return 0 end
put(queues, messages, now, to_wake)
if plan then commit(1, plan, now, expire) end
note_states(now)
return to_wake
