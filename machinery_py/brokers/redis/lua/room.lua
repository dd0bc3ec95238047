-- How much room a queue has. Queues are as putting.lua says.
--
-- waiting_in: how many messages wait in a queue.
-- full: of limits (index of a queue, how many may wait there at most), the first that is passed, as
-- a text: index and how many wait; nothing if all hold, or the token was used: then it is a repeat.
--! include brokers/redis/lua/putting.lua

local function waiting_in(q)
  local waiting = call('LLEN', q[1])
  for _, level in ipairs(call('ZRANGE', q[2] .. 'l', 0, -1)) do
    waiting = waiting + call(level == 'fair' and 'ZCARD' or 'LLEN', q[2] .. 'p:' .. level)
  end
  return waiting
end
local function full(queues, limits, token)
  if #limits == 0 or (token ~= '' and call('EXISTS', 'mpy:p:' .. token) == 1) then return end
  for _, one in ipairs(limits) do
    local waiting = waiting_in(queues[one[1] + 1])
    if waiting > one[2] then return int(one[1]) .. ' ' .. int(waiting) end
  end
end
