-- In: queue, bodies that were its first. Out: for each whether it was still there, and is gone.
-- Looks no further than so many bodies: workers take others from the head, which brings them nearer.
--! include brokers/redis/lua/messages.lua

local q, bodies = unpacked[1], unpacked[2]
local p, places, gone = q[2], {}, {}
for i, body in ipairs(bodies) do
  gone[i] = 0
  places[body] = places[body] or {}
  table.insert(places[body], i)
end
local function take(body)
  local place = places[body] and table.remove(places[body], 1)
  if place then gone[place] = 1 end
  return place
end
local function thin(list)
  local found, kept = call('LRANGE', list, 0, #bodies - 1), {}
  for _, body in ipairs(found) do
    if take(body) then call('HDEL', p .. 'a', redis.sha1hex(body)) else kept[#kept + 1] = body end
  end
  if #found == 0 then return end
  call('LTRIM', list, #found, -1)
  for i = #kept, 1, -1 do call('LPUSH', list, kept[i]) end
end
key_type(q[1], 'list')
key_type(p .. 'a', 'hash')
key_type(p .. 'o', 'list')
local levels = call('ZREVRANGE', p .. 'l', 0, -1)
for _, level in ipairs(levels) do key_type(p .. 'p:' .. level, level == 'fair' and 'zset' or 'list') end
for _, level in ipairs(levels) do
  local list = p .. 'p:' .. level
  if level == 'fair' then
    for _, text in ipairs(call('ZRANGE', list, 0, #bodies - 1)) do
      if take(unwrap(text).body) then call('ZREM', list, text) end
    end
  else
    thin(list)
  end
  if call('EXISTS', list) == 0 then
    call('ZREM', p .. 'l', level)
    for _, lane in ipairs(level == 'fair' and call('ZRANGE', p .. 'x', 0, -1) or {}) do
      -- The turn that is served stays: what is in flight may come back with an older one.
      if string.find(lane, ':', 1, true) then call('ZREM', p .. 'x', lane) end
    end
  end
end
thin(q[1])
if call('EXISTS', q[1]) == 0 then call('DEL', p .. 'o') end
return gone
