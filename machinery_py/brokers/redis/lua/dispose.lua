-- In: now, session, queues, disposals (index of the queue, receipt, fate, µs until it is due, head of
-- the dead letter).
-- Out: a letter each, s or f; clients to be woken.
--! include brokers/redis/lua/messages.lua

local text, session, queues, disposals = unpack(unpacked)
local now, to_wake, backs, verdicts, raws, taken = now_of(text), {}, {}, {}, {}, {}
for i, d in ipairs(disposals) do
  local q = queues[d[1] + 1]
  local flight = q[2] .. 'f:' .. session
  local raw = not taken[flight .. d[2]] and call('HGET', flight, d[2])
  if raw and not can_end(q, d[3], raw) then raw = false end
  verdicts[i], raws[i] = raw and 's' or 'f', raw
  if raw then taken[flight .. d[2]] = true end
end
for i, d in ipairs(disposals) do
  local q = queues[d[1] + 1]
  if raws[i] then end_delivery(q, q[2] .. 'f:' .. session, d[2], raws[i], d[3], d[4], d[5], backs, now, to_wake) end
end
give_backs(backs, now, to_wake)
return {table.concat(verdicts), to_wake}
