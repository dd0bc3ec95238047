-- In: now, token, queues, messages. Out: 0 if the token was used before, else the connections to be
-- woken.
--! include brokers/redis/lua/messages.lua

local text, token, queues, messages = unpack(unpacked)
local now, to_wake = now_of(text), {}
check(queues, messages, now)
if token ~= '' and not call('SET', 'mpy:p:' .. token, '1', 'NX', 'EX', $TOKEN_LIFE) then return 0 end
put(queues, messages, now, to_wake)
return to_wake
