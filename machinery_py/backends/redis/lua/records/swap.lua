-- holds: whether a record holds `expected` ("" is no record). swap: let it hold `body`. With a
-- life, in seconds, it is a claim.
--! include connections/redis/lua/prelude.lua

local function holds(name, expected, life)
  if life > 0 then
    key_type('mpy:u:' .. name, 'string')
    return (call('GET', 'mpy:u:' .. name) or '') == expected
  end
  key_type('mpy:records', 'hash')
  counter('mpy:records:n')
  return (call('HGET', 'mpy:records', name) or '') == expected
end
local function swap(name, body, life)
  if life > 0 then
    if body == '' then call('DEL', 'mpy:u:' .. name) else call('SET', 'mpy:u:' .. name, body, 'EX', int(life)) end
    return
  end
  if body == '' then call('HDEL', 'mpy:records', name) else call('HSET', 'mpy:records', name, body) end
  call('INCR', 'mpy:records:n')
end
