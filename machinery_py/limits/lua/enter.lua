-- In: now, scope, who, token, ttl in µs, again (1 or 0), rules: [[name, key, limit, interval in µs,
-- strict (1 or 0)], …]. Out: 0 and the numbers of the rules in which it has a slot; or the µs that it
-- has to wait, and the number of the rule that holds it back. May be carried out twice.
--
-- Says what `enter` in rules.py says, with the same numbers.
--! include limits/lua/records.lua

local text, scope, who, token, ttl, again, rules = unpack(unpacked)
local now = now_of(text)

local function place_of(one)
  for at, place in ipairs(one.waiting) do
    if place[1] == who then return at end
  end
end
local function has_no_place(one, at)
  if at then return false end
  return #one.waiting >= $MOST_WAITING or (one.tail > now and again == 0)
end
local function free_at(one) return min(one.tat, now + $EARLY + one.interval) end
local function wait_for_slot(one, ahead)
  local oldest
  for _, run in ipairs(one.running) do
    if run[1] == who then return 0 end
    oldest = max(oldest or now - run[3], now - run[3])
  end
  oldest = oldest or 0
  local free = one.limit - #one.running
  if ahead < free then return 0 end
  local each, before = max(one.mean, $SHORTEST_WAIT), ahead - max(free, 0)
  local expected = max(each - oldest, 0) + floor(before * each / max(one.limit, 1))
  local wait = max(expected, floor(oldest / 4), $SHORTEST_WAIT)
  return min(wait, $PLACE_WAIT * (before + 1), $LONGEST_WAIT)
end
local function wait_of(one, strict)
  local at = place_of(one)
  local ahead = at and at - 1 or #one.waiting
  if one.interval == 0 then return wait_for_slot(one, ahead) end
  if one.last == token then return 0 end
  local due = 0
  for i = 1, ahead do
    if one.waiting[i][2] <= now then due = due + 1 end
  end
  local is_due = at and one.waiting[at][2] <= now + $EARLY
  local early = strict == 1 and 0 or min(floor(one.interval / 2), $EARLY)
  local left = is_due and 0 or min(due * one.interval, $OVERDUE)
  if free_at(one) + left <= now + early then return 0 end
  local turn = max(free_at(one), now) + ahead * one.interval
  if has_no_place(one, at) then turn = max(turn, one.tail + one.interval) end
  return min(max(turn - now, 1), $LOOK_AGAIN)
end
local function begin(one, strict)
  local at = place_of(one)
  if at then table.remove(one.waiting, at) end
  if one.interval == 0 then
    one.running = without(one.running, 1, who)
    one.running[#one.running + 1] = {who, token, now, now + ttl}
  elseif one.last ~= token then
    local lag = (max(one.limit, 1) - 1) * one.interval
    if at or again == 1 then lag = max(lag, $LATE) end
    local begins_at = strict == 1 and now or max(free_at(one), now - lag)
    one.tat, one.last = begins_at + one.interval, token
  end
end
local function note(one, wait)
  local at = place_of(one)
  if wait == 0 then
    if at then table.remove(one.waiting, at) end
  elseif at then
    one.waiting[at][2] = now + wait
  elseif has_no_place(one, at) then
    one.tail = max(one.tail, now + wait)
  else
    one.waiting[#one.waiting + 1] = {who, now + wait}
  end
end

local changed = {}
for _, rule in ipairs(cmsgpack.unpack(call('GET', 'mpy:limit:{' .. scope .. '}') or '\144')) do
  changed[rule[1]] = rule
end
local records, waits, longest, held_by = {}, {}, 0, 0
for i, rule in ipairs(rules) do
  local set = changed[rule[1]]
  if set then rule[3], rule[4], rule[5] = set[2], set[3], set[4] end
  local one = record_of(scope, rule[1] .. ':' .. rule[2])
  one.limit, one.interval = rule[3], rule[4]
  one.running, one.waiting = later(one.running, 4, now), later(one.waiting, 2, now - $OVERDUE)
  records[i], waits[i] = one, wait_of(one, rule[5])
  if waits[i] > longest then longest, held_by = waits[i], i end
end
local reply = {longest}
if longest > 0 then reply[2] = held_by end
for i, rule in ipairs(rules) do
  local one = records[i]
  if longest > 0 then
    note(one, waits[i])
  else
    begin(one, rule[5])
    if one.interval == 0 then reply[#reply + 1] = i end
  end
  save(scope, rule[1] .. ':' .. rule[2], one, now)
end
return reply
