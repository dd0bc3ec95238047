"""The scripts that change messages and states of one Redis as one step (docs/explanation/redis-protocol.md).

What is in queues, messages, states, groups, arrivals and changes is said in brokers/redis_lua.py and
backends/redis_lua.py.
"""

from __future__ import annotations

from machinery_py._drivers.redis_lua import Script
from machinery_py.backends.redis_lua import LIBRARY as STATES
from machinery_py.brokers.redis_lua import LIBRARY as MESSAGES
from machinery_py.brokers.redis_scripts import TOKEN_LIFE

_BOTH = MESSAGES + STATES

# In: now, seconds that finished states are kept, token, queues, messages, change or nothing. Out: 0 if the token was used
# before, else connections to be woken.
SUBMIT = Script(_BOTH + rf"""
local text, expire, token, queues, messages, change = unpack(unpacked)
local now, rung, plan = now_of(text), {{}}, nil
check(queues, messages)
local key = 'mpy:p:' .. token
if token ~= '' and call('EXISTS', key) == 1 then return 0 end
if change then
  local _
  _, plan = decide(change)
end
if token ~= '' then call('SET', key, '1', 'EX', {TOKEN_LIFE}) end
for _, q in ipairs(queues) do call('SADD', 'mpy:queues', q[1]) end
put(queues, messages, now, rung)
if plan then commit(change, plan, now, expire) end
note_states(now)
return rung
""")

# In: now, seconds, session, queues, own queues (how many of `queues`, the first), settlements, marks.
#   settlement: queue, receipt, fate, due, head of a dead letter, change or false, messages
#   mark:       queue, receipt, change
# Out: a letter for each settlement: s, a or f; connections to be woken.
# All are decided first; then the deliveries are removed, which a full Redis allows, and lets the rest pass; then all is
# written. Marks come last, and are dropped when they cannot be written: they must not keep what is over from being settled.
SETTLE = Script(_BOTH + r"""
local text, expire, session, queues, settlements, marks = unpack(unpacked)
local now, rung, backs, verdicts, plans = now_of(text), {}, {}, {}, {}
local flights, over = {}, {}
for i, q in ipairs(queues) do flights[i], over[i] = q[2] .. 'f:' .. session, {} end
for i, one in ipairs(settlements) do
  local index, receipt, fate, change, messages = one[1] + 1, one[2], one[3], one[6], one[7]
  if not over[index][receipt] and call('HEXISTS', flights[index], receipt) == 1 then
    verdicts[i], plans[i] = 's', nil
    if change then verdicts[i], plans[i] = decide(change) end
    if #messages > 0 then check(queues, messages) end
    if fate ~= 'done' then key_type(queues[index][1], 'list') end
    over[index][receipt] = i
  else
    local row = change and read(change[1])
    verdicts[i] = (row and row.mark ~= '' and row.mark == change[2]) and 'a' or 'f'
  end
end
local gone = {}
for i, one in ipairs(settlements) do
  local index = one[1] + 1
  if one[3] == 'done' and over[index][one[2]] == i then
    gone[index] = gone[index] or {}
    table.insert(gone[index], one[2])
  end
end
for index, list in pairs(gone) do rows('HDEL', flights[index], list) end
for i, one in ipairs(settlements) do
  local index, receipt, fate, messages = one[1] + 1, one[2], one[3], one[7]
  if over[index][receipt] == i then
    if fate ~= 'done' then
      local raw = call('HGET', flights[index], receipt)
      end_delivery(queues[index], flights[index], receipt, raw, fate, one[4], one[5], backs, now, rung)
    end
    if plans[i] then commit(one[6], plans[i], now, expire) end
    if verdicts[i] == 's' and #messages > 0 then put(queues, messages, now, rung) end
  end
end
give_backs(backs, now, rung)
note_states(now)
for _, mark in ipairs(marks) do
  if call('HEXISTS', flights[mark[1] + 1], mark[2]) == 1 then
    local fine = pcall(function()
      local verdict, plan = decide(mark[3])
      if verdict == 's' then commit(mark[3], plan, now, expire) end
    end)
    if not fine then break end
  end
end
if #open > 0 then pcall(note_states, now) end
return {table.concat(verdicts), rung}
""")

# In: now, seconds, queues, messages, change that fires a group. Out: nothing if that was done before, else connections to be
# woken.
FIRE = Script(_BOTH + r"""
local text, expire, queues, messages, change = unpack(unpacked)
local now, rung = now_of(text), {}
check(queues, messages)
local verdict, plan = decide(change)
if verdict ~= 's' then
  settled_elsewhere(change[5])
  return false
end
for _, q in ipairs(queues) do call('SADD', 'mpy:queues', q[1]) end
commit(change, plan, now, expire)
note_states(now)
put(queues, messages, now, rung)
return rung
""")
