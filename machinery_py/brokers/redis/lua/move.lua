-- In: now, queues, messages whose bodies are members of Go's set. Out: clients to be woken.
-- Each is taken out by one mover.
--! include brokers/redis/lua/messages.lua

local text, queues, messages = unpack(unpacked)
local now, to_wake, ours = now_of(text), {}, {}
check(queues, messages, now)
for _, m in ipairs(messages) do
  if call('ZREM', DELAYED, m[$BODY]) == 1 then ours[#ours + 1] = m end
end
put(queues, ours, now, to_wake)
return to_wake
