-- How bodies come to the list of a queue, which is (name, prefix of our keys).
--
-- due_in_set: up to so many of a set of delayed messages that are due, the first due first, while a script
-- moves fewer than $BYTES; few at once, since their sizes are not known before.
-- give: puts bodies on a queue's list, at its head or tail, and marks when; the first that a queue
-- ever gets, that it is there. What comes back to an empty list has a mark only if none is left.
--! include brokers/redis/lua/waking.lua

local moved_bytes = 0
local function due_in_set(key, now, most)
  local texts, step = {}, 1
  while #texts < most and moved_bytes < $BYTES do
    local size = math.min(step, most - #texts)
    local some = call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', #texts, size)
    for _, text in ipairs(some) do
      texts[#texts + 1] = text
      moved_bytes = moved_bytes + #text
    end
    if #some < size then break end
    step = math.min(2 * step, $AT_ONCE)
  end
  return texts
end
local function list_of(q, level)
  if level > 0 then return q[2] .. 'p:' .. int(level) end
  return q[1]
end
local function give(q, level, bodies, at_head, now, to_wake)
  local list, p = list_of(q, level), q[2]
  local length
  for i = 1, #bodies, 2000 do
    length = call(at_head and 'LPUSH' or 'RPUSH', list, unpack(bodies, i, math.min(i + 1999, #bodies)))
  end
  if level > 0 then
    try('SADD', 'mpy:queues', q[1])
    call('ZADD', p .. 'l', level, int(level))
    wake(q, 'v', #bodies, to_wake)
  elseif not at_head then
    local place, last = (try('INCRBY', p .. 'c', #bodies) or #bodies) - #bodies, nil
    if place == 0 then try('SADD', 'mpy:queues', q[1]) end
    if length == #bodies then call('DEL', p .. 'o') else last = try('LINDEX', p .. 'o', -1) end
    if not last or now - tonumber(string.match(last, ' (%d+)') or 0) >= $EVERY then
      if (try('RPUSH', p .. 'o', int(place) .. ' ' .. int(now)) or 0) > $MARKS then call('LPOP', p .. 'o') end
    end
  elseif length == #bodies and call('EXISTS', p .. 'o') == 0 then
    try('RPUSH', p .. 'o', int((tonumber(try('GET', p .. 'c') or '') or 0) - length) .. ' ' .. int(now))
  end
  if level == 0 then wake(q, 'w', #bodies, to_wake) end
end
