-- In: now, seconds that finished states are kept, name, expected, body, life, C of nothing or one
-- change, S. Out: 1, or 0 if nothing was written.
--! include backends/redis/lua/changes.lua
--! include backends/redis/lua/records/swap.lua

local text, expire, name, expected, body, life
text, expire, name, expected, body, life, C, S = unpack(unpacked)
local now, plan, _ = now_of(text), nil, nil
if not holds(name, expected, life) then return 0 end
if C[1] then
  listable({1})
  look_at({1})
  _, plan = decide(1)
end
swap(name, body, life)
if plan then commit(1, plan, now, expire) end
note_states(now)
return 1
