-- The records of limits (rules.py: LimitRecord), and their keys. The names of a scope's keys:
--
-- mpy:limit:{<scope>}               what was changed: [[rule, limit, interval, strict], …]
-- mpy:limit:{<scope>}:<rule>:<key>  a record
-- mpy:limits:{<scope>}              the records, scored by the moment from which they say nothing
--
-- record_of(scope, key): a record, or an empty one where there is none, or something else.
-- save(scope, key, record, now). without(list, field, value): the entries that have another value.
--! include connections/redis/lua/prelude.lua

local min, max, floor = math.min, math.max, math.floor
local function record_key(scope, key) return 'mpy:limit:{' .. scope .. '}:' .. key end
local function record_of(scope, key)
  local text = call('GET', record_key(scope, key))
  local fine, kept = pcall(cmsgpack.unpack, text or '')
  if not (text and fine and type(kept) == 'table' and #kept == 8) then
    kept = {0, 0, $LONG_AGO, 0, 0, '', {}, {}}
  end
  local limit, interval, tat, tail, mean, last, running, waiting = unpack(kept)
  return {limit = limit, interval = interval, tat = tat, tail = tail, mean = mean, last = last,
    running = running, waiting = waiting}
end
local function save(scope, key, one, now)
  local until_at = max(one.tat + max(one.limit, 1) * one.interval, one.tail)
  for _, run in ipairs(one.running) do until_at = max(until_at, run[4]) end
  for _, place in ipairs(one.waiting) do until_at = max(until_at, place[2] + $OVERDUE) end
  until_at = until_at + $KEPT
  local ms = max(floor((until_at - now) / 1000), 1)
  local packed = cmsgpack.pack({one.limit, one.interval, one.tat, one.tail, one.mean, one.last,
    one.running, one.waiting})
  call('SET', record_key(scope, key), packed, 'PX', int(ms))
  local index = 'mpy:limits:{' .. scope .. '}'
  call('ZADD', index, int(until_at), key)
  call('ZREMRANGEBYSCORE', index, '-inf', int(now))
end
local function without(list, field, value)
  local left = {}
  for _, one in ipairs(list) do
    if one[field] ~= value then left[#left + 1] = one end
  end
  return left
end
local function later(list, field, moment)
  local left = {}
  for _, one in ipairs(list) do
    if one[field] > moment then left[#left + 1] = one end
  end
  return left
end
