-- In: now, seconds that finished states are kept, name, expected, body, life, C of nothing or one
-- change, S. Out: 1, or 0 if nothing was written.
--! include backends/redis/lua/changes.lua
--! include backends/redis/lua/records/swap.lua

local text, expire, name, expected, body, life
text, expire, name, expected, body, life, C, S = unpack(unpacked)
local now = now_of(text)
if not holds(name, expected, life) then return 0 end
local _, plan = decide_first()
swap(name, body, life)
if plan then commit(1, plan, now, expire) end
note_states(now)
return 1
