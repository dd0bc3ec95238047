-- In: now, seconds that finished states are kept, token, number of its steps, limits, their queues, C
-- of nothing or one change, S, R. Out: what `full` says; 0 if a rider refuses it; else nothing, and
-- from here on the staged steps will be carried out. A repeat does nothing.
--! include brokers/redis/lua/room.lua
--! include backends/redis/lua/changes.lua
--! include stores/lua/staged.lua

local text, expire, token, count, limits, queues
text, expire, token, count, limits, queues, C, S, R = unpack(unpacked)
local now = now_of(text)
if call('EXISTS', 'mpy:p:' .. token) == 1 then return end
complete(token, count)
local no_room = full(queues, limits, token)
if no_room then return no_room end
local verdict, plan = decide_first()
if verdict == 'c' then return 0 end
call('SET', 'mpy:p:' .. token, '1', 'EX', '$TOKEN_LIFE')
adopt(token, now)
if plan then commit(1, plan, now, expire) end
note_states(now)
