-- In: now, seconds that finished states are kept, C, S, R. Out: a letter each: s(ettled), a(lready),
-- f(enced), c(onflict).
--! include backends/redis/lua/changes.lua

local text, expire
text, expire, C, S, R = unpack(unpacked)
local now, changes, verdicts, plans = now_of(text), {}, {}, {}
for c = 1, #C, $CHANGE do changes[#changes + 1] = c end
listable(changes)
look_at(changes)
for i, c in ipairs(changes) do verdicts[i], plans[i] = decide(c) end
for i, c in ipairs(changes) do
  if not plans[i] then leave_to_go(c, expire) end
end
for i, c in ipairs(changes) do
  if plans[i] then commit(c, plans[i], now, expire) end
end
note_states(now)
return table.concat(verdicts)
