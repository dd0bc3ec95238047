-- When something is due.
--
-- soonest: of each delayed set the first member and its score, if a script has read it.
-- first_due: whether Go's delayed set is what it should be; if not, nothing is due in it.
-- due_in: µs until the next is due in the sets of these queues or Go's; -1 if nothing is. It asks not again what
-- `soonest` has.
--! include connections/redis/lua/prelude.lua

local soonest = {}
local function first_due()
  local found = try('ZRANGE', '$DELAYED', 0, 0, 'WITHSCORES')
  soonest['$DELAYED'] = found or {}
  return found
end
local function due_in(queues, now)
  local least
  local function look(key, unit)
    local first = soonest[key] or call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if first[2] then
      local left = tonumber(first[2]) / unit - now
      if not least or left < least then least = left end
    end
  end
  look('$DELAYED', 1000)
  for _, q in ipairs(queues) do look(q[2] .. 'z', 1) end
  return least and math.max(0, math.floor(least)) or -1
end
