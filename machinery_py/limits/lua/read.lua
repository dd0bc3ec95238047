-- In: now, scope, most. Out: now, what was changed, and for at most so many records, the newest
-- first, its key and itself.
--! include limits/lua/records.lua

local text, scope, most = unpack(unpacked)
local now = now_of(text)
local reply = {int(now), call('GET', 'mpy:limit:{' .. scope .. '}') or ''}
local index = 'mpy:limits:{' .. scope .. '}'
call('ZREMRANGEBYSCORE', index, '-inf', int(now))
for _, key in ipairs(call('ZREVRANGE', index, 0, most - 1)) do
  local record = call('GET', record_key(scope, key))
  if record then
    reply[#reply + 1] = key
    reply[#reply + 1] = record
  end
end
return reply
