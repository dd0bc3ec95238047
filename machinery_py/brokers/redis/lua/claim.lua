-- In: now, session, queues, limit, number of this claim, numbers of lost ones, client (see waking.lua) or "", true if
-- it will block, true if it may be noted as a blocked client, true if it is to say how long messages
-- have waited; key of the fences; for each queue the highest receipt that
-- the session knows; if there are lost claims, for each queue
-- (the highest receipt before them, those that were reported since), which are not looked at again.
-- Out: what is left of the session (1, or 0 if it was given up); µs until something is due (-1:
-- nothing is); how many tasks are revoked; clients to be woken; msgpack of (queue, first
-- receipt, fence, strikes, parks, priority, µs waited or -1, how many), in which the receipts
-- follow each other; which queue the client is to block at, from 1 on (0: all are paused or spoilt); texts
-- that name keys under which something else lies; the bodies in that order, since to pack them would
-- make one more string of them; the fence of the first body, which those of the others follow; 1 if
-- more of the lost claims is left. A queue with such a key is left alone, and the others are claimed from.
--! include brokers/redis/lua/idle.lua
--! include brokers/redis/lua/entries.lua
--! include brokers/redis/lua/next_due.lua
--! include connections/redis/lua/fences.lua

local text, session, queues, limit, claim, lost, client, will_sleep, noted, timed, fences_key, highest, known = unpack(unpacked)
local now, to_wake, found, given, problems, claimed, left = now_of(text), {}, {}, {}, {}, 0, nil
local deliver_noted, return_arrivals  -- below

local function expect(kind, key)
  local fine, problem = pcall(key_type, key, kind)
  if not fine then problems[#problems + 1] = words(problem) end
end
if not first_due() then expect('zset', '$DELAYED') end
local revoked = try('ZCARD', 'mpy:revoked')
if not revoked then
  expect('zset', 'mpy:revoked')
  revoked = 1  -- as far as we know
end
local function report_queue(q, problem)
  local before = #problems
  expect('list', q[1])
  for _, suffix in ipairs({'s', 'l', 'z'}) do expect('zset', q[2] .. suffix) end
  if #problems == before then problems[before + 1] = words(problem) end
end
-- A queue is usual if this session has it, it is not paused, nothing is there to claim but what has arrived or
-- is on its list, and nothing is noted of that.
local function read_queue(q, place)
  local p = q[2]
  local one = {q = q, place = place, waiting = call('LLEN', q[1]), is_alive = call('ZSCORE', p .. 's', session),
               arrived = call('LRANGE', p .. 'i:' .. session, 0, -1), parked = call('ZRANGE', p .. 'z', 0, 0, 'WITHSCORES')}
  one.has_due = one.parked[2] and tonumber(one.parked[2]) <= now
  if not one.has_due then soonest[p .. 'z'] = one.parked end
  one.is_usual = one.is_alive and not one.has_due and call('EXISTS', p .. 'u', p .. 'l', p .. 'a') == 0
  if one.waiting > 0 or #one.arrived > 0 or not one.is_usual then counter(p .. 'n') end
  return one
end
-- Out of the lists: while fewer than $BYTES are claimed, and few at once, since their sizes are not known before.
local function pop(list, most)
  local bodies, step = {}, 1
  while #bodies < most and claimed < $BYTES do
    local size = math.min(step, most - #bodies)
    local some = call('LPOP', list, size) or {}
    for _, body in ipairs(some) do
      bodies[#bodies + 1] = body
      claimed = claimed + #body
    end
    if #some < size then break end
    step = math.min(2 * step, $AT_ONCE)
  end
  return bodies
end
-- µs that each of these messages has waited, which were just taken from the list: since the last mark
-- at its place or before. Marks of an empty list go: a Go program, which makes none, may fill it. What
-- has arrived at a blocked client has not waited.
local function waits_of(q, taken, has_arrived)
  local marks, remain, waits = q[2] .. 'o', call('LLEN', q[1]), {}
  local function place_in(mark) return mark and tonumber(string.match(mark, '^%-?%d+')) or math.huge end
  if not has_arrived then
    local place = (tonumber(try('GET', q[2] .. 'c') or '') or 0) - remain - taken
    local low, high = 0, try('LLEN', marks) or 0
    while low + 1 < high do
      local middle = math.floor((low + high) / 2)
      if place_in(call('LINDEX', marks, middle)) <= place then low = middle else high = middle end
    end
    local near, at = try('LRANGE', marks, low, low + taken) or {}, 1
    local when, next_place = tonumber(string.match(near[1] or '', ' (%d+)')), place_in(near[2])
    for i = 0, taken - 1 do
      while place + i >= next_place do
        at = at + 1
        when, next_place = tonumber(string.match(near[at], ' (%d+)')), place_in(near[at + 1])
      end
      waits[i + 1] = when and math.max(0, now - when) or -1
    end
  else
    for i = 1, taken do waits[i] = 0 end
  end
  if remain == 0 then call('DEL', marks) end
  return waits
end
-- The receipt before the next so many. A crash of the server or a failover may have undone claims that this session runs
-- still: it gets none of their receipts again, or the end of one run would end another message.
local function before_next(one, many)
  local counts, last = one.q[2] .. 'n', highest[one.place + 1]
  local first = call('INCRBY', counts, many) - many
  if first >= last then return first end
  call('SET', counts, int(last + many))
  return last
end
-- Into flight, and into the reply.
local function deliver(one, level, bodies, has_arrived)
  if #bodies == 0 then return end
  local waits = timed and level == 0 and waits_of(one.q, #bodies, has_arrived) or {}
  local first = before_next(one, #bodies)
  if one.has_notes then return deliver_noted(one, first, level, bodies, waits) end
  local entries, head, from = {}, wrap(claim, level, 1, 0, 0, '', ''), 1
  for i, body in ipairs(bodies) do
    entries[2 * i - 1] = int(first + i)
    entries[2 * i] = head .. body
    given[#given + 1] = body
  end
  for i = waits[1] and 1 or #bodies, #bodies do
    if i == #bodies or waits[i] ~= waits[i + 1] then
      found[#found + 1] = {one.place, first + from, 1, 0, 0, level, waits[i] or -1, i - from + 1}
      from = i + 1
    end
  end
  rows('HSET', one.q[2] .. 'f:' .. session, entries)
end
local function take_arrivals(one)
  if #one.arrived == 0 then return end
  call('DEL', one.q[2] .. 'i:' .. session)
  if one.is_paused then return return_arrivals(one) end
  for _, body in ipairs(one.arrived) do claimed = claimed + #body end
  deliver(one, 0, one.arrived, true)
end
local function take_list(one, most)
  if #given < limit then deliver(one, 0, pop(one.q[1], math.min(most, limit - #given))) end
end
local function reply(intact)
  local all, open, blocking, may_be_away = {}, {}, nil, #intact > 1
  for _, one in ipairs(intact) do
    all[#all + 1] = one.q
    -- From a paused queue nothing is taken, and nobody sleeps at its list; resuming it wakes those who noted themselves.
    if not one.is_paused then
      open[#open + 1] = one.q
      blocking = blocking or one
    end
    if will_sleep and #given == 0 then
      note_idle(one.q, client, one ~= blocking and not one.is_paused, noted and may_be_away)
    elseif noted then
      forget_idle(one.q, client, may_be_away)
    end
  end
  local due, first, counted = due_in(all, now), 0, true
  pass_on(open, #given >= limit or claimed >= $BYTES, due, to_wake)
  if #given > 0 then first, counted = fences(fences_key, #given, now) end
  if not counted then expect('string', fences_key) end
  return {1, due, revoked, to_wake, cmsgpack.pack(found), blocking and blocking.place + 1 or 0, problems, given, first, left}
end

local intact, is_usual = {}, #lost == 0
for place, q in ipairs(queues) do
  local fine, one = pcall(read_queue, q, place - 1)
  if fine then
    intact[#intact + 1] = one
    is_usual = is_usual and one.is_usual
  else
    report_queue(q, one)
  end
end
if is_usual then
  for _, one in ipairs(intact) do take_arrivals(one) end
  for _, one in ipairs(intact) do
    if one.waiting > 0 then take_list(one, one.waiting) end
  end
  return reply(intact)
end

-- All other cases. What follows is made only for them: to make it costs a claim more than its commands.
--! include brokers/redis/lua/messages.lua

local function read_rest(one)
  local p = one.q[2]
  one.is_paused, one.has_notes = key_type(p .. 'u', 'set'), key_type(p .. 'a', 'hash')
  one.levels = call('ZREVRANGE', p .. 'l', 0, -1)
  for _, level in ipairs(one.levels) do
    if level == 'fair' then can_give(one.q, $FAIR) else key_type(p .. 'p:' .. level, 'list') end
  end
  if #one.arrived > 0 and (one.is_paused or not one.is_alive) then usable(one.q, {}) end
end
local function fly(one, receipt, m, wait)
  local level = m.level > 255 and math.ceil(m.level / $FAIR) - 1 or m.level
  found[#found + 1] = {one.place, receipt, m.fence, m.strikes, m.parks, level, wait or -1, 1}
  given[#given + 1] = m.body
  return wrap(claim, m.level, m.fence, m.strikes, m.parks, m.label, m.body)
end
local function take_note(q, body)
  local digest = redis.sha1hex(body)
  local note = call('HGET', q[2] .. 'a', digest)
  if note then call('HDEL', q[2] .. 'a', digest) end
  local fence, strikes, parks, at = string.match(note or '0 0 0\n', '^(%d+) (%d+) (%d+)\n()')
  return {fence = tonumber(fence), strikes = tonumber(strikes), parks = tonumber(parks), label = string.sub(note or '', at), body = body}
end
function deliver_noted(one, first, level, bodies, waits)
  local entries = {}
  for i, body in ipairs(bodies) do
    local m = take_note(one.q, body)
    m.level, m.fence = level, m.fence + 1
    entries[2 * i - 1] = int(first + i)
    entries[2 * i] = fly(one, first + i, m, m.fence == 1 and waits[i])
  end
  rows('HSET', one.q[2] .. 'f:' .. session, entries)
end
function return_arrivals(one)
  for i = #one.arrived, 1, -1 do give(one.q, 0, {one.arrived[i]}, true, now, to_wake) end
end
local function take_lost(one)
  local flight, low, reported, unknown, is_lost = one.q[2] .. 'f:' .. session, 0, {}, {}, {}
  if known then
    low = known[one.place + 1][1]
    for _, receipt in ipairs(known[one.place + 1][2]) do reported[receipt] = true end
  end
  for _, receipt in ipairs(call('HKEYS', flight)) do
    receipt = tonumber(receipt)
    if receipt > low and not reported[receipt] then unknown[#unknown + 1] = receipt end
  end
  table.sort(unknown)
  for _, number in ipairs(lost) do is_lost[int(number)] = true end
  for _, receipt in ipairs(unknown) do
    if claimed >= $BYTES then
      left = 1
      break
    end
    local m = unwrap(call('HGET', flight, int(receipt)))
    if is_lost[m.number] then
      call('HSET', flight, int(receipt), fly(one, receipt, m))
      claimed = claimed + #m.body
    end
  end
end
local function bring_parked(one)
  -- While others wait, half of a claim is theirs: more may come back than can ever be asked.
  local room = not one.is_paused and math.max(1, limit - #given)
  if room and call('EXISTS', one.q[1], one.q[2] .. 'l') > 0 then room = math.floor((room + claim % 2) / 2) end
  if room ~= 0 and parked(one.q, now, to_wake, one.parked, room) then
    one.levels, one.has_notes = call('ZREVRANGE', one.q[2] .. 'l', 0, -1), true
  end
end
local function pop_fair(set, most)
  local all, step = {}, 1
  while #all / 2 < most and claimed < $BYTES do
    local some = call('ZPOPMIN', set, math.min(step, most - #all / 2))
    for i, value in ipairs(some) do
      all[#all + 1] = value
      if i % 2 == 1 then claimed = claimed + #value end
    end
    if #some == 0 then break end
    step = math.min(2 * step, $AT_ONCE)
  end
  return all
end
local function take_fair(one, most)
  local q, p, entries, served = one.q, one.q[2], {}, {}
  -- What Go has put on the list waits with the others, as of tenant '': no more than may be claimed.
  local last, turn = call('ZSCORE', p .. 'x', '1:'), call('ZSCORE', p .. 'x', '1')
  local before = claimed
  if not last or not turn or last - turn < most then
    for _, body in ipairs(pop(q[1], most)) do
      local m = take_note(q, body)
      m.level = $FAIR
      place(q, m, false, now, {})
    end
  end
  claimed = before  -- what was placed there is not claimed yet
  local all = pop_fair(p .. 'p:fair', most)
  local first = before_next(one, #all / 2)
  for i = 1, #all, 2 do
    local m, receipt = unwrap(all[i]), first + (i + 1) / 2
    m.fence = m.fence + 1
    entries[i], entries[i + 1] = int(receipt), fly(one, receipt, m)
    served[math.ceil(m.level / $FAIR)] = -m.level
  end
  rows('HSET', p .. 'f:' .. session, entries)
  for top, now_served in pairs(served) do
    call('ZADD', p .. 'x', 'GT', now_served, int(top))
    call('ZREMRANGEBYSCORE', p .. 'x', -top * $FAIR, '(' .. int(now_served))
  end
  if call('EXISTS', p .. 'p:fair') == 0 then call('ZREM', p .. 'l', 'fair') end
end
local function take_levels(one)
  for _, level in ipairs(one.levels) do
    local list = one.q[2] .. 'p:' .. level
    if #given < limit and level == 'fair' then
      take_fair(one, limit - #given)
    elseif #given < limit then
      deliver(one, tonumber(level), pop(list, limit - #given))
      if call('EXISTS', list) == 0 then call('ZREM', one.q[2] .. 'l', level) end
    end
  end
end

local is_alive = true
for i = #intact, 1, -1 do
  local fine, problem = pcall(read_rest, intact[i])
  if not fine then report_queue(table.remove(intact, i).q, problem) end
end
for _, one in ipairs(intact) do
  is_alive = is_alive and one.is_alive
  if noted then forget_idle(one.q, client, #intact > 1) end  -- it wakes others, and not itself
end
noted = false
if not is_alive then
  for _, one in ipairs(intact) do
    call('DEL', one.q[2] .. 'i:' .. session)
    return_arrivals(one)
  end
  return {0, -1, 1, to_wake, cmsgpack.pack(found), 0, problems, given, 0}
end
for _, one in ipairs(intact) do
  if #lost > 0 then take_lost(one) end
  take_arrivals(one)
end
for _, one in ipairs(intact) do
  if one.has_due then bring_parked(one) end
  if not one.is_paused then
    take_levels(one)
    take_list(one, limit)
  end
end
return reply(intact)
