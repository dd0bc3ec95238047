-- In: now, seconds that finished states are kept, token, number of its steps, limits, their queues, C
-- of nothing or one change, S. Out: nothing, or what `full` says. From here on the staged steps will
-- be carried out; a repeat does nothing.
--! include brokers/redis/lua/room.lua
--! include backends/redis/lua/changes.lua
--! include stores/lua/staged.lua

local text, expire, token, count, limits, queues
text, expire, token, count, limits, queues, C, S = unpack(unpacked)
local now = now_of(text)
if call('EXISTS', 'mpy:p:' .. token) == 1 then return end
complete(token, count)
local no_room = full(queues, limits, token)
if no_room then return no_room end
local _, plan = decide_first()
call('SET', 'mpy:p:' .. token, '1', 'EX', '$TOKEN_LIFE')
adopt(token, now)
if plan then commit(1, plan, now, expire) end
note_states(now)
