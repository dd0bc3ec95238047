-- A claim in the plain case: of queues that are not paused, where nothing waits but what is on the
-- list, and of that nothing is noted; by a session that is registered and has lost no claim. It is
-- answered here, with what claim.lua says. In all other cases nothing was written, and the rest of
-- claim.lua follows, which is the whole truth.
--
-- waits_of: µs that each of these messages has waited, which were just taken from the list: since
-- the last mark at its place or before. Marks of an empty list go: a Go program, which makes none,
-- may fill it. What has arrived at a blocked client has not waited.
-- pop: takes up to so many from the head of a list, while fewer than $BYTES are claimed; few at once,
-- since their sizes are not known before.
-- fly: brings messages of which nothing is noted into flight, and adds them to `found` and `given`.
-- note_idle, forget_idle: adds a client to those that are woken, takes it out.
-- pass_on: who has claimed all that it may does not look again soon, so another one is told of what
-- waits, or is due before it looks by itself.
--! include brokers/redis/lua/waking.lua
--! include connections/redis/lua/fences.lua

local claimed = 0
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
local function pass_on(queues, is_full, due, to_wake)
  if not is_full then return end
  local soon = due >= 0 and due < $SOON
  for _, q in ipairs(queues) do
    if soon or call('EXISTS', q[1], q[2] .. 'l') > 0 then wake(q, 'v', 1, to_wake) end
  end
end
local function note_idle(q, client, is_away)
  if client == '' then return end
  local v, w = q[2] .. 'v', q[2] .. 'w'
  local number, life = string.match(client, '^(%d+)%.(%w+)$')
  if life and try('SET', q[2] .. 'life', life, 'EX', '$IDLE_LIFE', 'GET') ~= life then call('DEL', v, w) end
  try('SADD', v, number or client)
  try('EXPIRE', v, '$IDLE_LIFE')
  if is_away then
    try('SADD', w, number or client)
    try('EXPIRE', w, '$IDLE_LIFE')
  end
end
local function forget_idle(q, client, was_away)
  client = string.match(client, '^(%d+)%.%w+$') or client
  try('SREM', q[2] .. 'v', client)
  if was_away then try('SREM', q[2] .. 'w', client) end  -- the order may have been another
end
local function waits_of(q, taken, has_arrived, now)
  local marks, left, waits = q[2] .. 'o', call('LLEN', q[1]), {}
  local function place_in(mark) return mark and tonumber(string.match(mark, '^%-?%d+')) or math.huge end
  if not has_arrived then
    local place = (tonumber(try('GET', q[2] .. 'c') or '') or 0) - left - taken
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
  if left == 0 then call('DEL', marks) end
  return waits
end
local function fly(found, given, place, q, session, claim, level, bodies, waits)
  local first = call('INCRBY', q[2] .. 'n', #bodies) - #bodies
  local entries, head, from = {}, claim .. ' ' .. level .. ' 1 0 0 0\n', 1
  for i, body in ipairs(bodies) do
    entries[2 * i - 1] = int(first + i)
    entries[2 * i] = head .. body
    given[#given + 1] = body
  end
  for i = waits[1] and 1 or #bodies, #bodies do
    if i == #bodies or waits[i] ~= waits[i + 1] then
      found[#found + 1] = {place, first + from, 1, 0, 0, level, waits[i] or -1, i - from + 1}
      from = i + 1
    end
  end
  rows('HSET', q[2] .. 'f:' .. session, entries)
end
do
  local text, session, queues, limit, claim, lost, client, will_sleep, noted, apart, timed, fence = unpack(unpacked)
  local now, least, revoked, lengths, arrived = now_of(text), math.huge, 0, {}, {}
  local function is_due(key, unit)
    local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    if first then least = math.min(least, tonumber(first) / unit - now) end
    return least <= 0
  end
  local function is_plain()
    for i, q in ipairs(queues) do
      local p = q[2]
      if call('EXISTS', p .. 'u', p .. 'l', p .. 'a') > 0 or not call('ZSCORE', p .. 's', session) or is_due(p .. 'z', 1) then
        return false
      end
      lengths[i], arrived[i] = call('LLEN', q[1]), call('LRANGE', p .. 'i:' .. session, 0, -1)
      if lengths[i] > 0 or #arrived[i] > 0 then counter(p .. 'n') end
    end
    is_due('$DELAYED', 1000)
    counter(fence)
    revoked = call('ZCARD', 'mpy:revoked')
    return true
  end
  local fine, plain = false, #lost == 0 and #queues > 0
  if plain then fine, plain = pcall(is_plain) end
  if fine and plain then
    local found, given = {}, {}
    local function deliver(i, bodies, has_arrived)
      local waits = timed and waits_of(queues[i], #bodies, has_arrived, now) or {}
      fly(found, given, i - 1, queues[i], session, claim, 0, bodies, waits)
    end
    for i, q in ipairs(queues) do
      if #arrived[i] > 0 then
        call('DEL', q[2] .. 'i:' .. session)
        for _, body in ipairs(arrived[i]) do claimed = claimed + #body end
        deliver(i, arrived[i], true)
      end
    end
    for i, q in ipairs(queues) do
      if #given < limit and lengths[i] > 0 then
        local bodies = pop(q[1], math.min(limit - #given, lengths[i]))
        if #bodies > 0 then deliver(i, bodies) end
      end
    end
    local due, to_wake = least < math.huge and math.max(0, math.floor(least)) or -1, {}
    for i, q in ipairs(queues) do
      if will_sleep and #given == 0 then
        note_idle(q, client, apart or i > 1)
      elseif noted then
        forget_idle(q, client, apart or #queues > 1)
      end
    end
    pass_on(queues, #given >= limit or claimed >= $BYTES, due, to_wake)
    local first = #given > 0 and fences(fence, #given, now) or 0
    return {1, due, revoked, to_wake, cmsgpack.pack(found), 1, {}, given, first}
  end
end
