-- In: now, askings: [[scope, who, token, ttl in µs, again (1 or 0), rules: [[name, key, limit,
-- interval in µs, strict (1 or 0)], …], order], …]. Out: for each 0 and the numbers of the rules in which it
-- has a slot; or the µs that it has to wait, and the number of the rule that holds it back. May be
-- carried out twice.
--
-- Says what `enter` in rules.py says, with the same numbers, for one after the other.
--! include limits/lua/records.lua

local text, askings = unpack(unpacked)
local now, scope, who, token, ttl, again, rules, order = now_of(text)

local function refresh(one)
  if one.interval > 0 then one.tat = min(one.tat, now + $EARLY + one.interval) end
  one.tail = min(one.tail, now + $LOOK_AGAIN)
  local running, overdue = {}, false
  for _, run in ipairs(one.running) do
    if run[4] > now then running[#running + 1] = run end
    run[4] = min(run[4], now + max(ttl, $LOOK_AGAIN))
  end
  one.running = running
  for at, moment in ipairs(one.back_at) do
    one.back_at[at] = min(moment, now + $LOOK_AGAIN)
    overdue = overdue or moment <= now - $OVERDUE
  end
  if not overdue then return end
  local waiting, back_at = {}, {}
  for at, moment in ipairs(one.back_at) do
    if moment > now - $OVERDUE then
      waiting[#waiting + 1], back_at[#back_at + 1] = one.waiting[at], moment
    else
      call('HDEL', one.line, one.waiting[at])
    end
  end
  one.waiting, one.back_at = waiting, back_at
end
local function has_no_place(one, at)
  if at then return false end
  return #one.waiting >= $MOST_WAITING or (one.tail > now and again == 0)
end
local function behind_whom(one)
  local ahead = #one.waiting
  while order > 0 and ahead > 0 do
    if tonumber(call('HGET', one.line, one.waiting[ahead]) or 0) <= order then break end
    ahead = ahead - 1
  end
  return ahead
end
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
  local expected = max(each - oldest, 0) + floor(before * (each + $HANDOVER) / max(one.limit, 1))
  local wait = max(expected, floor(oldest / 4), $SHORTEST_WAIT)
  return min(wait, $PLACE_WAIT * (before + 1), $LONGEST_WAIT)
end
local function wait_of(one, strict)
  local at = place_of(one, who)
  local ahead = at and at - 1 or behind_whom(one)
  if one.interval == 0 then
    local wait = wait_for_slot(one, ahead)
    if wait > 0 and has_no_place(one, at) then
      local apart = min(floor(floor((one.mean + $HANDOVER) / max(one.limit, 1)) / 2), $SHORTEST_WAIT)
      wait = min(max(wait, one.tail + apart - now), $LOOK_AGAIN)
    end
    return wait
  end
  if one.last == token then return 0 end
  local early = strict == 1 and 0 or min(floor(one.interval / 2), $EARLY)
  local begins_at = one.tat
  if begins_at <= now + early then
    if at and one.back_at[at] <= now + $EARLY then return 0 end
    local due = 0
    for i = 1, ahead do
      if one.back_at[i] <= now + $EARLY then due = due + 1 end
    end
    if begins_at + min(due * one.interval, $OVERDUE) <= now + early then return 0 end
  end
  local turn = max(begins_at, now) + ahead * one.interval
  if has_no_place(one, at) then turn = max(turn, one.tail + one.interval) end
  return min(max(turn - now, 1), $LOOK_AGAIN)
end
local function begin(one, strict)
  local waited = drop(one, who) or again == 1
  if one.interval == 0 then
    local running = {}
    for _, run in ipairs(one.running) do
      if run[1] ~= who then running[#running + 1] = run end
    end
    running[#running + 1] = {who, token, now, now + ttl}
    one.running = running
  elseif one.last ~= token then
    local lag = (max(one.limit, 1) - 1) * one.interval
    if waited then lag = max(lag, $LATE) end
    if now > one.tat + one.interval + $SECOND then one.tail = 0 end
    local begins_at = strict == 1 and now or max(one.tat, now - lag)
    one.tat, one.last = begins_at + one.interval, token
  end
end
local function note(one, wait)
  local at = place_of(one, who)
  if wait == 0 then
    drop(one, who)
  elseif at then
    one.back_at[at] = now + wait
  elseif has_no_place(one, at) then
    one.tail = max(one.tail, now + wait)
  else
    at = behind_whom(one) + 1
    for i = at, #one.waiting do
      one.back_at[i] = max(one.back_at[i], min(one.back_at[i] + one.interval, now + $LOOK_AGAIN))
    end
    table.insert(one.waiting, at, who)
    table.insert(one.back_at, at, now + wait)
    call('HSET', one.line, who, int(order))
  end
end

local function enter()
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
    refresh(one)
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
end
local replies = {}
for i, asking in ipairs(askings) do
  scope, who, token, ttl, again, rules, order = unpack(asking)
  replies[i] = enter()
end
return replies
