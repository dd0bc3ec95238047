-- A rider is the change of a record, (name, expected, body, life), where "" is no record. With a life,
-- in seconds, it is a claim.
--
-- may_ride: whether each finds what it expects; `ridden` is what the changes decided so far leave
-- there. Writes nothing, and raises if something else lies under a key. ride: writes one.
--! include connections/redis/lua/prelude.lua

local ridden = {}
local function rider_key(r) return r[4] > 0 and 'mpy:u:' .. r[1] or 'record ' .. r[1] end
local function may_ride(riders)
  for _, r in ipairs(riders) do
    local holds = ridden[rider_key(r)]
    if r[4] > 0 then
      key_type('mpy:u:' .. r[1], 'string')
      holds = holds or call('GET', 'mpy:u:' .. r[1])
    else
      key_type('mpy:records', 'hash')
      counter('mpy:records:n')
      holds = holds or call('HGET', 'mpy:records', r[1])
    end
    if (holds or '') ~= r[2] then return false end
  end
  return true
end
local function ride(r)
  local name, body, life = r[1], r[3], r[4]
  if life > 0 then
    if body == '' then call('DEL', 'mpy:u:' .. name) else call('SET', 'mpy:u:' .. name, body, 'EX', int(life)) end
    return
  end
  if body == '' then call('HDEL', 'mpy:records', name) else call('HSET', 'mpy:records', name, body) end
  call('INCR', 'mpy:records:n')
end
