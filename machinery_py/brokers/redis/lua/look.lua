-- Of a queue with no message to claim, what was noted of messages is deleted: Go programs took them.
-- In: now, queues, lease in µs. Out: µs until something is due (-1); late sessions (queue, session,
-- beat); all sessions (queue, session); clients to be woken; 1 if sessions that are given up have
-- more that is to be given back.
--! include brokers/redis/lua/messages.lua

local text, queues, lease = unpack(unpacked)
local now, to_wake, late, all, intact, more = now_of(text), {}, {}, {}, {}, nil
local function read(q)
  return {z = call('ZRANGE', q[2] .. 'z', 0, 0, 'WITHSCORES'), s = call('ZRANGE', q[2] .. 's', 0, -1, 'WITHSCORES'),
          t = call('ZRANGE', q[2] .. 't', 0, -1)}
end
local function is_idle(q, found)
  if spoilt(q) or call('EXISTS', q[1], q[2] .. 'l') > 0 then return false end
  for i = 1, #found.s, 2 do
    if call('EXISTS', q[2] .. 'i:' .. found.s[i]) > 0 then return false end
  end
  for _, session in ipairs(found.t) do
    if call('EXISTS', q[2] .. 'i:' .. session) > 0 then return false end
  end
  return pcall(key_type, q[2] .. 'a', 'hash') and pcall(key_type, q[2] .. 'o', 'list')
end
first_due()
for _, q in ipairs(queues) do
  -- Where somebody keeps something else under one of its keys, the other queues are still looked after.
  local fine, found = pcall(read, q)
  if fine then
    intact[#intact + 1] = q
    -- Where messages wait, the claims do it, which know how many they have room for.
    if spoilt(q) or call('EXISTS', q[1], q[2] .. 'l') == 0 then parked(q, now, to_wake, found.z) end
    for i = 1, #found.s, 2 do
      local session, beat = found.s[i], tonumber(found.s[i + 1])
      all[#all + 1] = {q[1], session}
      if now - beat > lease then late[#late + 1] = {q[1], session, int(beat)} end
    end
    local emptied = not spoilt(q)
    for _, session in ipairs(emptied and found.t or {}) do
      if call('EXISTS', q[2] .. 'i:' .. session, q[2] .. 'f:' .. session) > 0 then
        local fine, entries, left = pcall(can_empty, q, session)
        if fine then empty(q, session, false, now, to_wake, entries, left) end
        if fine and left > 0 then more = 1 end
        emptied = emptied and fine and left == 0
      end
    end
    if emptied then call('ZREMRANGEBYSCORE', q[2] .. 't', '-inf', now) end
    if is_idle(q, found) then call('DEL', q[2] .. 'a', q[2] .. 'o') end
  end
end
return {due_in(intact, now), late, all, to_wake, more}
