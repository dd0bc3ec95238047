-- In: now, token, limits, queues, messages. Out: 0 if the token was used before; what `full` says, if
-- a limit is passed; else the clients to be woken.
--! include brokers/redis/lua/messages.lua
--! include brokers/redis/lua/room.lua

local text, token, limits, queues, messages = unpack(unpacked)
local now, to_wake = now_of(text), {}
check(queues, messages, now)
local no_room = full(queues, limits, token)
if no_room then return no_room end
if token ~= '' and not call('SET', 'mpy:p:' .. token, '1', 'NX', 'EX', $TOKEN_LIFE) then return 0 end
put(queues, messages, now, to_wake)
return to_wake
