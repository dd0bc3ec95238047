-- In: now, µs to hold the slots or 0 to give them back, slots: [[scope, key of the record, who,
-- token], …]. Out: for each 1 if it is held or was given back, else 0. May be carried out
-- twice.
--
-- Says what `renew` and `leave` in rules.py say.
--! include limits/lua/records.lua

local text, ttl, slots = unpack(unpacked)
local now = now_of(text)

local function renew(one, who, token)
  local left = {}
  for _, run in ipairs(one.running) do
    if run[4] > now or run[2] == token then left[#left + 1] = run end
  end
  one.running = left
  for _, run in ipairs(left) do
    if run[1] == who then
      if run[2] ~= token then return 0 end
      run[4] = now + ttl
      return 1
    end
  end
  if one.limit > 0 and #left >= one.limit then return 0 end
  left[#left + 1] = {who, token, now, now + ttl}
  return 1
end
local function leave(one, who, token)
  for at, run in ipairs(one.running) do
    if run[1] == who and run[2] == token then
      table.remove(one.running, at)
      local took = max(now - run[3], 0)
      one.mean = one.mean > 0 and floor((3 * one.mean + took) / 4) or took
      if #one.waiting == 0 then one.tail = 0 end
      return 1
    end
  end
  drop(one, who)
  if one.interval > 0 and one.last == token then one.tat, one.last = one.tat - one.interval, '' end
  return 0
end

local reply, records = {}, {}
for _, slot in ipairs(slots) do
  records[record_key(slot[1], slot[2])] = record_of(slot[1], slot[2])
end
for i, slot in ipairs(slots) do
  local scope, key, who, token = unpack(slot)
  local one = records[record_key(scope, key)]
  -- A full Redis refuses only a script's first write. This one needs no room: a run must not lose its
  -- slot because others have filled the store.
  call('PERSIST', record_key(scope, key))
  reply[i] = ttl > 0 and renew(one, who, token) or leave(one, who, token)
  save(scope, key, one, now)
end
return reply
