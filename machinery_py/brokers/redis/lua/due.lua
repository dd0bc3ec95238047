-- In: now, most, room. Out: clients to be woken; how many messages were moved; bodies that are
-- due and stay, since only Python can say where they belong.
-- Moves what is due in Go's set to the queues: of the first `most`, the first due first, those whose
-- list holds less than `room`. Once the first has waited for $PATIENCE µs, there is room for all.
-- Of a body only the queue and the priority are cut out, if it is written as Go and this library
-- write it, and the queue is known.
--! include brokers/redis/lua/putting.lua

local text, most, room = unpack(unpacked)
local now, to_wake, moved, others, order, lists = now_of(text), {}, {}, {}, {}, {}
key_type(DELAYED, 'zset')
local first = call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')
if first[2] and tonumber(first[2]) / 1000 < now - $PATIENCE then room = math.huge end
local function place_of(body)
  local name = string.match(body, '^{"UUID":"[^"\\]*","Name":"[^"\\]*","RoutingKey":"([^"\\{]+)",')
  local _, at = string.find(body, ',"Priority":', 1, true)
  local level = at and string.match(body, '^(%d+),"Immutable":%a+,"RetryCount":', at + 1)
  -- Arguments and callbacks may have such fields as well.
  local _, queue = string.find(body, ',"RoutingKey":', 1, true)
  local again = string.find(body, ',"RoutingKey":', queue or 1, true) or string.find(body, ',"Priority":', at or 1, true)
  if level and not again then return name, tonumber(level) end
end
local function list_for(name, level)
  if level > 255 then level = 0 end
  local key = name .. ' ' .. level
  if lists[key] == nil then
    local q = {name, 'mpy:{' .. name .. '}:'}
    local known = try('SISMEMBER', 'mpy:queues', name) == 1 and pcall(can_give, q, level)
    lists[key] = known and {q = q, level = level, bodies = {}, full = room - call('LLEN', list_of(q, level))}
    order[#order + 1] = lists[key] or nil
  end
  return lists[key]
end
local bodies = due_in_set(DELAYED, int(now) .. '000', most)
for _, body in ipairs(bodies) do
  local name, level = place_of(body)
  local list = name and list_for(name, level)
  if not list then
    others[#others + 1] = body
  elseif #list.bodies < list.full then
    moved[#moved + 1] = body
    list.bodies[#list.bodies + 1] = body
  end
end
rows('ZREM', DELAYED, moved)
for _, list in ipairs(order) do
  if #list.bodies > 0 then give(list.q, list.level, list.bodies, false, now, to_wake) end
end
return {to_wake, #moved, others}
