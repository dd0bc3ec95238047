-- In: now, session, queues, the beat that was seen or "", for each queue the receipts that get a
-- strike (false: what the session has noted), µs of its tombstone. Out: -1 if the session has
-- beaten since or is gone, else how many messages it held; clients to be woken; 1 if some of them
-- are left to give_back.lua: they are large. A queue with something else under one of its keys stays as
-- it is.
--! include brokers/redis/lua/messages.lua

local text, session, queues, seen, began, tombstone = unpack(unpacked)
local now, to_wake, held, intact, back_now, left, more = now_of(text), {}, 0, {}, {}, {}, nil
local there = false
local function check_session(index, q)
  local beat = call('ZSCORE', q[2] .. 's', session)
  there = there or beat
  if beat and seen ~= '' and int(tonumber(beat)) ~= seen then return true end
  key_type(q[1], 'list')
  key_type(q[2] .. 't', 'zset')
  back_now[index], left[index] = can_empty(q, session)
  intact[#intact + 1] = index
end
for index, q in ipairs(queues) do
  local _, lives = pcall(check_session, index, q)
  if lives == true then return {-1, to_wake} end
end
if not there then return {-1, to_wake} end
for _, index in ipairs(intact) do
  local q = queues[index]
  call('ZREM', q[2] .. 's', session)
  call('DEL', q[2] .. 'b:' .. session)
  wake(q, 'v', 100000, to_wake)  -- its own client may be among them, and would be woken in place of another
  held = held + left[index] + empty(q, session, began and began[index], now, to_wake, back_now[index], left[index])
  if left[index] > 0 then more = 1 end
  call('ZADD', q[2] .. 't', now + tombstone, session)
end
return {held, to_wake, more}
