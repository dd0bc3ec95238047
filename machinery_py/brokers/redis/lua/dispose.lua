-- In: now, session, queues, disposals (index of the queue, receipt, fate, µs until it is due, head of
-- the dead letter).
-- Out: a letter each, s or f; clients to be woken.
--! include brokers/redis/lua/messages.lua

local text, session, queues, disposals = unpack(unpacked)
local now, to_wake, backs, verdicts, raws, taken = now_of(text), {}, {}, {}, {}, {}
for i, one in ipairs(disposals) do
  local queue, receipt, fate = unpack(one)
  local q = queues[queue + 1]
  local flight = q[2] .. 'f:' .. session
  local raw = not taken[flight .. receipt] and call('HGET', flight, receipt)
  if raw and not can_end(q, fate, raw) then raw = false end
  verdicts[i], raws[i] = raw and 's' or 'f', raw
  if raw then taken[flight .. receipt] = true end
end
for i, one in ipairs(disposals) do
  local queue, receipt, fate, left, head = unpack(one)
  local q = queues[queue + 1]
  if raws[i] then end_delivery(q, q[2] .. 'f:' .. session, receipt, raws[i], fate, left, head, backs, now, to_wake) end
end
give_backs(backs, now, to_wake)
return {table.concat(verdicts), to_wake}
