-- In: now, queue, (name of the move, message) of each, until when in µs. Out: 0 if it is too late,
-- else clients to be woken.
--! include brokers/redis/lua/messages.lua

local text, q, moves, latest = unpack(unpacked)
local now, to_wake, messages = now_of(text), {}, {}
if now > latest then return 0 end
for _, one in ipairs(moves) do check({q}, {one[2]}, now) end
for _, one in ipairs(moves) do
  if call('SET', 'mpy:p:' .. one[1], '1', 'NX', 'EX', $MOVE_LIFE) then messages[#messages + 1] = one[2] end
end
put({q}, messages, now, to_wake)
return to_wake
