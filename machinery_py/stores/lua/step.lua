-- One step of a large submission, as stage.lua takes it and carry.lua finds it: (now, seconds that
-- finished states are kept, token, number of the step, queues, messages, C of nothing or one change,
-- S). In the plain case: (now, seconds, token, number, queue, how many states, the items of plain.lua
-- and behind them the bodies, in one array).
--
-- general: queues and messages of any step; C and S are its states.
--! include stores/lua/plain.lua
--! include brokers/redis/lua/putting.lua
--! include backends/redis/lua/changes.lua

local function general(step)
  if type(step[6]) ~= 'number' then
    C, S = step[7], step[8]
    return step[5], step[6]
  end
  local items, messages = step[7], {}
  C, S = {'submit ' .. step[3], '', 0, false, '', 1, step[6] * $STATE, false, false, ''}, {}
  for at = 1, 4 * step[6], 4 do
    local doc = items[at + 1]
    local _, from = string.find(doc, '^.*"CreatedAt":"')
    local to = string.find(doc, '"', from + 1, true)
    local state = {items[at], 'PENDING', 0, string.sub(doc, 1, from), string.sub(doc, from + 1, to - 1), string.sub(doc, to),
                   not string.find(doc, '"TaskName":""', 1, true), string.sub(items[at + 2], 6), false, false, '', items[at + 3]}
    for _, value in ipairs(state) do S[#S + 1] = value end
  end
  for at = 4 * step[6] + 1, #items do messages[#messages + 1] = {0, 0, 0, '', 0, items[at]} end
  return {step[5]}, messages
end
