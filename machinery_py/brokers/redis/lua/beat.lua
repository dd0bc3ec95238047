-- In: now, session, queues. Out: 1, or 0 if the session was given up in one of its queues. The
-- score is removed first, so that a full Redis lets the beat pass. A queue whose registry is
-- something else is left out, here and in all that follows.
--! include brokers/redis/lua/messages.lua

local text, session, queues = unpack(unpacked)
local now = now_of(text)
local intact = {}
for _, q in ipairs(queues) do
  local fine, beat = pcall(call, 'ZSCORE', q[2] .. 's', session)
  if fine and not beat then return 0 end
  if fine then intact[#intact + 1] = q end
end
for _, q in ipairs(intact) do
  call('ZREM', q[2] .. 's', session)
  call('ZADD', q[2] .. 's', now, session)
end
return 1
