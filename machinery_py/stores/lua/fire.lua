-- In: now, seconds, queues, messages, C of one change that fires a group or ends a task, S, R. Out:
-- nothing if that was done before or a rider refuses it, else clients to be woken.
--! include brokers/redis/lua/putting.lua
--! include backends/redis/lua/changes.lua

local text, expire, queues, messages
text, expire, queues, messages, C, S, R = unpack(unpacked)
local now, to_wake = now_of(text), {}
check(queues, messages, now)
local verdict, plan = decide_first()
if verdict ~= 's' then
  leave_to_go(1, expire)
  return false
end
commit(1, plan, now, expire)
note_states(now)
put(queues, messages, now, to_wake)
return to_wake
