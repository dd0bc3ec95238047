-- In: now, session, queues. Out: how many messages were given back; how many are left; connections to
-- be woken. Goes on with what condemn.lua left of a session that is given up.
--! include brokers/redis/lua/messages.lua

local text, session, queues = unpack(unpacked)
local now, to_wake, count, left = now_of(text), {}, 0, 0
local function give_back(q)
  if call('ZSCORE', q[2] .. 's', session) then return end
  key_type(q[1], 'list')
  local entries, more = can_empty(q, session)
  count = count + empty(q, session, false, now, to_wake, entries, more)
  left = left + more
end
for _, q in ipairs(queues) do pcall(give_back, q) end
return {count, left, to_wake}
