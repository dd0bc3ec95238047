-- In: now, seconds, session, queues, settlements, marks, C, S, R. Settlements and marks are flat:
--   settlement: queue, receipt, fate, place of its change or 0, false or (µs until it is due, head
--               of a dead letter, messages)
--   mark:       queue, receipt, place of its change
-- Out: a letter for each settlement: s, a, f or c; clients to be woken. All are decided first;
-- then the deliveries are removed, which a full Redis allows, and lets the rest pass; then all is
-- written. Marks come last, and are dropped when they cannot be written: they must not keep what is
-- over from being settled. What cannot come back, wait or die, since something else lies under a
-- key of its queue, stays in flight, and is fenced.
--! include stores/lua/plain_ends.lua
--! include brokers/redis/lua/messages.lua
--! include backends/redis/lua/changes.lua

local text, expire, session, queues, ends, marks
text, expire, session, queues, ends, marks, C, S, R = unpack(unpacked)
ends = rest
local now, to_wake, backs, verdicts, plans = now_of(text), {}, {}, {}, {}
local flights, asked, held, over, gone, changes = {}, {}, {}, {}, {}, {}
for i, q in ipairs(queues) do
  flights[i], asked[i], held[i], over[i], gone[i] = q[2] .. 'f:' .. session, {}, {}, {}, {}
end
for at = 1, #ends, $END do table.insert(asked[ends[at + $END_QUEUE] + 1], ends[at + $END_RECEIPT]) end
for index, receipts in ipairs(asked) do
  for from = 1, #receipts, 1000 do
    local to = math.min(from + 999, #receipts)
    local found = call('HMGET', flights[index], unpack(receipts, from, to))
    for i = from, to do held[index][receipts[i]] = found[i - from + 1] end
  end
end
for at = 1, #ends, $END do
  if ends[at + $END_CHANGE] > 0 then changes[#changes + 1] = ends[at + $END_CHANGE] end
end
listable(changes)
look_at(changes)
for at = 1, #ends, $END do
  local queue, receipt, fate, c, more = unpack(ends, at, at + $END - 1)
  local index, verdict = queue + 1, 's'
  local raw = held[index][receipt]
  if raw and not over[index][receipt] and can_end(queues[index], fate, raw) then
    if c > 0 then verdict, plans[at] = decide(c) end
    if verdict ~= 'c' then
      if more and #more[3] > 0 then check(queues, more[3], now) end
      if fate == 'done' then table.insert(gone[index], receipt) end
      over[index][receipt] = at
    end
  else
    local row = c > 0 and read(C[c])
    verdict = (row and row.mark ~= '' and row.mark == C[c + $MARK]) and 'a' or 'f'
  end
  verdicts[#verdicts + 1] = verdict
end
for index, list in ipairs(gone) do rows('HDEL', flights[index], list) end
for at = 1, #ends, $END do
  local queue, receipt, fate, c, more = unpack(ends, at, at + $END - 1)
  local index = queue + 1
  if over[index][receipt] == at then
    if fate ~= 'done' then
      end_delivery(queues[index], flights[index], receipt, held[index][receipt], fate, more[1], more[2], backs, now, to_wake)
    end
    if plans[at] then commit(c, plans[at], now, expire) end
    if more and verdicts[(at - 1) / $END + 1] == 's' and #more[3] > 0 then put(queues, more[3], now, to_wake) end
  end
end
give_backs(backs, now, to_wake)
note_states(now)
for at = 1, #marks, 3 do
  local index, receipt, c = marks[at] + 1, marks[at + 1], marks[at + 2]
  if call('HEXISTS', flights[index], receipt) == 1 then
    pcall(function()
      local verdict, plan = decide(c)
      if verdict == 's' then commit(c, plan, now, expire) end
    end)
  end
end
if #open > 0 then pcall(note_states, now) end
local at = 0
for i, letter in ipairs(letters) do
  if letter == '' then
    at = at + 1
    letters[i] = verdicts[at]
  end
end
return {table.concat(letters), to_wake}
