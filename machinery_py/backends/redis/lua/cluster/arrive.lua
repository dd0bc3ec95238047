-- In: arrival. Out: 0, 1 if its group is ready to be fired, 2 if it was.
--! include backends/redis/lua/changes.lua

local a = unpacked[1]
local g, h = group_keys(a[1])
key_type(g, 'hash')
key_type(h, 'set')
if call('SADD', h, a[2]) == 1 then
  call('HSET', g, 'total', a[3], 'callback', a[5])
  if not a[4] then call('HSETNX', g, 'failed', a[2]) end
end
local failed, fired = call('HGET', g, 'failed'), call('HGET', g, 'fired')
if fired then return 2 end
if a[5] ~= '' and (failed or (a[3] > 0 and call('SCARD', h) >= a[3])) then
  call('PERSIST', g)
  call('PERSIST', h)
  return 1
end
call('EXPIRE', g, $LONG)
call('EXPIRE', h, $LONG)
return 0
