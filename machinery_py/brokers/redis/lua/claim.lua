-- In: now, session, queues, limit, number of this claim, numbers of lost ones, client (see waking.lua) or "", true if
-- it will block, true if it may be noted as a blocked client, true if it blocks at none of these
-- queues, true if it is to say how long messages have waited; key of the fences; if there are lost claims, for each queue
-- (the highest receipt before them, those that were reported since), which are not looked at again.
-- Out: what is left of the session (1, or 0 if it was given up); µs until something is due (-1:
-- nothing is); how many tasks are revoked; clients to be woken; msgpack of (queue, first
-- receipt, fence, strikes, parks, priority, µs waited or -1, how many), in which the receipts
-- follow each other; which queue the client is to block at, from 1 on (0: all are paused or spoilt); texts
-- that name keys under which something else lies; the bodies in that order, since to pack them would
-- make one more string of them; the fence of the first body, which those of the others follow; 1 if more of the lost claims is left. A queue with such a key is left alone, and the others are claimed from.
--! include brokers/redis/lua/plain_claim.lua
--! include brokers/redis/lua/messages.lua

local text, session, queues, limit, claim, lost, client, will_sleep, noted, apart, timed, fences_key, known = unpack(unpacked)
local now, to_wake, found, given, with_notes, places, problems, left = now_of(text), {}, {}, {}, {}, {}, {}, nil
local function report(index, receipt, fence, strikes, parks, level, wait, body)
  if level > 255 then level = math.ceil(level / $FAIR) - 1 end
  found[#found + 1] = {places[index] - 1, receipt, fence, strikes, parks, level, wait or -1, 1}
  given[#given + 1] = body
end
local function deliver(index, q, level, bodies, has_arrived)
  if #bodies == 0 then return end
  local waits = timed and level == 0 and waits_of(q, #bodies, has_arrived, now) or {}
  if not with_notes[index] then
    fly(found, given, places[index] - 1, q, session, claim, level, bodies, waits)
    return
  end
  local first = call('INCRBY', q[2] .. 'n', #bodies) - #bodies
  local a, entries = q[2] .. 'a', {}
  for i, body in ipairs(bodies) do
    local digest = redis.sha1hex(body)
    local note = call('HGET', a, digest)
    local fence, strikes, parks, at = string.match(note or '0 0 0\n', '^(%d+) (%d+) (%d+)\n()')
    if note then call('HDEL', a, digest) end
    fence, strikes, parks = fence + 1, tonumber(strikes), tonumber(parks)
    entries[2 * i - 1] = int(first + i)
    entries[2 * i] = wrap(claim, level, fence, strikes, parks, string.sub(note or '', at), body)
    report(index, first + i, fence, strikes, parks, level, fence == 1 and waits[i], body)
  end
  rows('HSET', q[2] .. 'f:' .. session, entries)
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
local alive, arrived, levels, firsts, stopped, blocking_queue = true, {}, {}, {}, {}, 0
local function expect(kind, ...)
  for _, key in ipairs({...}) do
    local fine, problem = pcall(key_type, key, kind)
    if not fine then problems[#problems + 1] = words(problem) end
  end
end
local function read_queue(index, q)
  local p = q[2]
  key_type(q[1], 'list')
  counter(p .. 'n')
  with_notes[index] = key_type(p .. 'a', 'hash')
  local beat = call('ZSCORE', p .. 's', session)
  arrived[index] = call('LRANGE', p .. 'i:' .. session, 0, -1)
  levels[index] = call('ZREVRANGE', p .. 'l', 0, -1)
  for _, level in ipairs(levels[index]) do
    if level == 'fair' then can_give(q, $FAIR) else key_type(p .. 'p:' .. level, 'list') end
  end
  firsts[index] = call('ZRANGE', p .. 'z', 0, 0, 'WITHSCORES')
  stopped[index] = key_type(p .. 'u', 'set')
  if #arrived[index] > 0 and (stopped[index] or not beat) then usable(q, {}) end
  alive = beat and alive
end
if not first_due() then expect('zset', DELAYED) end
expect('string', fences_key)
local revoked = try('ZCARD', 'mpy:revoked')
if not revoked then
  expect('zset', 'mpy:revoked')
  revoked = 1  -- as far as we know
end
local all = queues
queues = {}
for place, q in ipairs(all) do
  local index = #queues + 1
  local fine, problem = pcall(read_queue, index, q)
  if fine then
    queues[index], places[index] = q, place
    -- From a paused queue nothing is taken, and nobody sleeps at its list; resuming it wakes those who noted themselves.
    if blocking_queue == 0 and not stopped[index] then blocking_queue = index end
  else
    local before = #problems
    expect('zset', q[2] .. 's', q[2] .. 'l', q[2] .. 'z')
    if #problems == before then problems[before + 1] = words(problem) end
  end
end
for _, q in ipairs(queues) do
  if noted then forget_idle(q, client, apart or #queues > 1) end
end
local function return_arrivals(q, bodies)
  for i = #bodies, 1, -1 do give(q, 0, {bodies[i]}, true, now, to_wake) end
end
if not alive then
  for index, q in ipairs(queues) do
    call('DEL', q[2] .. 'i:' .. session)
    return_arrivals(q, arrived[index])
  end
  return {0, -1, 1, to_wake, cmsgpack.pack(found), 0, problems, given, 0}
end
for index, q in ipairs(queues) do
  if #lost > 0 then
    local flight, low, reported, unknown, is_lost = q[2] .. 'f:' .. session, 0, {}, {}, {}
    if known then
      low = known[places[index]][1]
      for _, receipt in ipairs(known[places[index]][2]) do reported[receipt] = true end
    end
    for _, receipt in ipairs(call('HKEYS', flight)) do
      receipt = tonumber(receipt)
      if receipt > low and not reported[receipt] then unknown[#unknown + 1] = receipt end
    end
    table.sort(unknown)
    for _, one in ipairs(lost) do is_lost[int(one)] = true end
    for _, receipt in ipairs(unknown) do
      if claimed >= $BYTES then
        left = 1
        break
      end
      local m = unwrap(call('HGET', flight, int(receipt)))
      if is_lost[m.number] then
        call('HSET', flight, int(receipt), wrap(claim, m.level, m.fence, m.strikes, m.parks, m.label, m.body))
        report(index, receipt, m.fence, m.strikes, m.parks, m.level, -1, m.body)
        claimed = claimed + #m.body
      end
    end
  end
  if #arrived[index] > 0 then
    call('DEL', q[2] .. 'i:' .. session)
    for _, body in ipairs(arrived[index]) do claimed = claimed + #body end
    if stopped[index] then return_arrivals(q, arrived[index]) else deliver(index, q, 0, arrived[index], true) end
  end
end
for index, q in ipairs(queues) do
  -- While others wait, half of a claim is theirs: more may come back than can ever be asked.
  local room = not stopped[index] and math.max(1, limit - #given)
  if room and call('EXISTS', q[1], q[2] .. 'l') > 0 then room = math.floor((room + claim % 2) / 2) end
  if room ~= 0 and parked(q, now, to_wake, firsts[index], room) then
    levels[index], with_notes[index] = call('ZREVRANGE', q[2] .. 'l', 0, -1), true
  end
  if #given < limit and not stopped[index] then
    for _, level in ipairs(levels[index]) do
      if #given < limit and level == 'fair' then
        local p, most, entries, served = q[2], limit - #given, {}, {}
        -- What Go has put on the list waits with the others, as of tenant '': no more than may be claimed.
        local last, turn = call('ZSCORE', p .. 'x', '1:'), call('ZSCORE', p .. 'x', '1')
        local before = claimed
        if not last or not turn or last - turn < most then
          for _, body in ipairs(pop(q[1], most)) do
            local note = call('HGET', p .. 'a', redis.sha1hex(body)) or '0 0 0\n'
            local fence, strikes, parks, at = string.match(note, '^(%d+) (%d+) (%d+)\n()')
            call('HDEL', p .. 'a', redis.sha1hex(body))
            place(q, {level = $FAIR, fence = fence, strikes = strikes, parks = parks, label = string.sub(note, at), body = body}, false, now, {})
          end
        end
        claimed = before  -- what was placed there is not claimed yet
        local all = pop_fair(p .. 'p:fair', most)
        local first = call('INCRBY', p .. 'n', #all / 2) - #all / 2
        for i = 1, #all, 2 do
          local m, receipt = unwrap(all[i]), first + (i + 1) / 2
          entries[i] = int(receipt)
          entries[i + 1] = wrap(claim, m.level, m.fence + 1, m.strikes, m.parks, m.label, m.body)
          report(index, receipt, m.fence + 1, m.strikes, m.parks, m.level, -1, m.body)
          served[math.ceil(m.level / $FAIR)] = -m.level
        end
        rows('HSET', p .. 'f:' .. session, entries)
        for top, now_served in pairs(served) do
          call('ZADD', p .. 'x', 'GT', now_served, int(top))
          call('ZREMRANGEBYSCORE', p .. 'x', -top * $FAIR, '(' .. int(now_served))
        end
        if call('EXISTS', p .. 'p:fair') == 0 then call('ZREM', p .. 'l', 'fair') end
      elseif #given < limit then
        local list = q[2] .. 'p:' .. level
        deliver(index, q, tonumber(level), pop(list, limit - #given))
        if call('EXISTS', list) == 0 then call('ZREM', q[2] .. 'l', level) end
      end
    end
    if #given < limit then deliver(index, q, 0, pop(q[1], limit - #given)) end
  end
end
if will_sleep and #given == 0 then
  for index, q in ipairs(queues) do
    note_idle(q, client, (apart or index ~= blocking_queue) and not stopped[index])
  end
end
local due = due_in(queues, now)
local open = {}
for index, q in ipairs(queues) do open[#open + 1] = not stopped[index] and q or nil end
pass_on(open, #given >= limit or claimed >= $BYTES, due, to_wake)
local first = #given > 0 and fences(fences_key, #given, now) or 0
return {1, due, revoked, to_wake, cmsgpack.pack(found), places[blocking_queue] or 0, problems, given, first, left}
