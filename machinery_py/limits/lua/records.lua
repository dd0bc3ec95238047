-- The records of limits (rules.py: LimitRecord), and their keys. The names of a scope's keys:
--
-- mpy:limit:{<scope>}               what was changed: [[rule, limit, interval, strict], …]
-- mpy:limit:{<scope>}:<rule>:<key>  a record
-- mpy:limits:{<scope>}:<rule>:<key> the order of each that waits; apart, since older programs know
--                                   records without it
-- mpy:limits:{<scope>}              the records, scored by the moment until which they are kept
--
-- record_of(scope, key): a record, or an empty one where there is none, or something else.
-- save(scope, key, record, now). place_of(record, who). drop(record, who): whether it was in line.
--! include connections/redis/lua/prelude.lua

local min, max, floor = math.min, math.max, math.floor
local function record_key(scope, key) return 'mpy:limit:{' .. scope .. '}:' .. key end
local function line_of(scope, key) return 'mpy:limits:{' .. scope .. '}:' .. key end
local function index_of(scope) return 'mpy:limits:{' .. scope .. '}' end
local function record_of(scope, key)
  key_type(index_of(scope), 'zset')
  local text = call('GET', record_key(scope, key))
  local fine, kept = pcall(cmsgpack.unpack, text or '')
  if not (text and fine and type(kept) == 'table' and #kept == 9) then
    kept = {0, 0, $LONG_AGO, 0, 0, '', {}, {}, {}}
  end
  local limit, interval, tat, tail, mean, last, running, waiting, back_at = unpack(kept)
  return {limit = limit, interval = interval, tat = tat, tail = tail, mean = mean, last = last,
    running = running, waiting = waiting, back_at = back_at, line = line_of(scope, key)}
end
local function save(scope, key, one, now)
  local until_at = max(one.tat + max(one.limit, 1) * one.interval, one.tail)
  for _, run in ipairs(one.running) do until_at = max(until_at, run[4]) end
  for _, moment in ipairs(one.back_at) do until_at = max(until_at, moment + $OVERDUE) end
  until_at = max(until_at, now) + $KEPT
  local life = int(floor((until_at - now) / 1000))
  if #one.waiting > 0 then call('PEXPIRE', one.line, life) end
  local packed = cmsgpack.pack({one.limit, one.interval, one.tat, one.tail, one.mean, one.last,
    one.running, one.waiting, one.back_at})
  call('SET', record_key(scope, key), packed, 'PX', life)
  local index = index_of(scope)
  call('ZADD', index, int(until_at), key)
  if call('PTTL', index) < tonumber(life) then call('PEXPIRE', index, life) end
  call('ZREMRANGEBYSCORE', index, '-inf', int(now))
end
local function place_of(one, who)
  for at, name in ipairs(one.waiting) do
    if name == who then return at end
  end
end
local function drop(one, who)
  local at = place_of(one, who)
  if not at then return false end
  table.remove(one.waiting, at)
  table.remove(one.back_at, at)
  call('HDEL', one.line, who)
  return true
end
