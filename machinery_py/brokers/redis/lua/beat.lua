-- In: now, session, queues, whether the session is stalled. Out: 1, or 0 if the session was given
-- up in one of its queues. The score is removed first, so that a full Redis lets the beat pass. A
-- queue whose registry is something else is left out, here and in all that follows.
--! include brokers/redis/lua/messages.lua

local text, session, queues, stalled = unpack(unpacked)
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
local note = ',"stalled":true}'
local function set_stalled(key)
  local record = call('GET', key)
  if not record or (string.sub(record, -#note) == note) == stalled then return end
  record = stalled and string.sub(record, 1, -2) .. note or string.sub(record, 1, -1 - #note) .. '}'
  call('SET', key, record)
end
for _, q in ipairs(intact) do pcall(set_stalled, q[2] .. 'b:' .. session) end
return 1
