-- In: now, token, or "" for a submission that nobody has gone on with for so long, µs. Out: nothing
-- if no step is left; else clients to be woken, the token, and why its next step is not carried
-- out now, or "". The first write is a removal, which a full Redis allows, and lets the rest pass.
--! include stores/lua/step.lua
--! include stores/lua/staged.lua

local text, token, age = unpack(unpacked)
local now, to_wake = now_of(text), {}
key_type('mpy:committed', 'zset')
if token == '' then
  token = call('ZRANGEBYSCORE', 'mpy:committed', '-inf', int(now - age), 'LIMIT', 0, 1)[1]
end
if not token or not call('ZSCORE', 'mpy:committed', token) then return false end
local number = call('HGET', staged(token), 'next') or '0'
local step = call('HGET', staged(token), number)
if not step then
  call('ZREM', 'mpy:committed', token)
  call('DEL', staged(token))
  return false
end
step = cmsgpack.unpack(step)
local queues, messages
local new = type(step[6]) == 'number' and step[5][1] ~= '$DELAYED' and is_new(step[7], 1, step[6], 4, {})
local fine, plan = pcall(function()
  if new then return can_give(step[5], 0) end
  queues, messages = general(step)
  check(queues, messages, now)
  return select(2, decide_first())
end)
if not fine then
  try('ZADD', 'mpy:committed', int(now), token)
  return {to_wake, token, words(plan)}
end
call('HDEL', staged(token), number)
call('HSET', staged(token), 'next', int(number + 1))
call('ZADD', 'mpy:committed', int(now), token)
if new then
  give(step[5], 0, {unpack(step[7], 4 * step[6] + 1)}, false, now, to_wake)
  write_new(step[7], 1, step[6], now)
else
  put(queues, messages, now, to_wake)
  if plan then commit(1, plan, now, step[2]) end
  note_states(now)
end
return {to_wake, token, ''}
