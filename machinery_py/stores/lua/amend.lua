-- In: now, seconds that finished states are kept, name, expected, body, life, C of nothing or one
-- change, S, queues, messages, token and number of the steps that are staged for it, or "" and 0.
-- Out: nothing if the record held something else, else clients to be woken.
--! include brokers/redis/lua/putting.lua
--! include backends/redis/lua/changes.lua
--! include backends/redis/lua/records/swap.lua
--! include stores/lua/staged.lua

local text, expire, name, expected, body, life, queues, messages, token, count
text, expire, name, expected, body, life, C, S, queues, messages, token, count = unpack(unpacked)
local now, to_wake = now_of(text), {}
if not holds(name, expected, life) then return false end
check(queues, messages, now)
if count > 0 then complete(token, count) end
local _, plan = decide_first()
swap(name, body, life)
if count > 0 then adopt(token, now) end
if plan then commit(1, plan, now, expire) end
note_states(now)
put(queues, messages, now, to_wake)
return to_wake
