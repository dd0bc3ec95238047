-- In: arrival. Out: 0, 1 if its group is ready to be fired, 2 if it was.
--! include backends/redis/lua/changes.lua

local a = unpacked[1]
local g, h = group_keys(a[$GROUP])
key_type(g, 'hash')
key_type(h, 'set')
if call('SADD', h, a[$MEMBER]) == 1 then
  call('HSET', g, 'total', a[$TOTAL], 'callback', a[$CALLBACK])
  if not a[$OK] then call('HSETNX', g, 'failed', a[$MEMBER]) end
end
local failed, fired = call('HGET', g, 'failed'), call('HGET', g, 'fired')
if fired then return 2 end
if a[$CALLBACK] ~= '' and (failed or (a[$TOTAL] > 0 and call('SCARD', h) >= a[$TOTAL])) then
  call('PERSIST', g)
  call('PERSIST', h)
  return 1
end
call('EXPIRE', g, $LONG)
call('EXPIRE', h, $LONG)
return 0
