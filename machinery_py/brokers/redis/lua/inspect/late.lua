-- In: queues, limit, the set to begin with (0: Go's; 1: that of the first queue), its members to leave
-- out. Out: msgpack of (queue or "" for Go's set, due in µs, member); the set and how many of its members
-- are to be left out by the next call, which are -1 if this was the last one: none is behind $BYTES.
--! include brokers/redis/lua/messages.lua

local queues, limit, set, skip = unpack(unpacked)
local found, size = {}, 0
local function look(key, name, unit)
  local step = 1
  while skip < limit and size < $BYTES do
    local count = math.min(step, limit - skip)
    local rows = call('ZRANGE', key, skip, skip + count - 1, 'WITHSCORES')
    for i = 1, #rows, 2 do
      local due = math.floor(tonumber(rows[i + 1]) / unit + 0.5)
      found[#found + 1] = '\147' .. bin(name) .. cmsgpack.pack(due) .. bin(rows[i])
      size = size + #rows[i]
    end
    skip = skip + #rows / 2
    if #rows < 2 * count then return true end
    step = math.min(2 * step, $AT_ONCE)
  end
  return skip >= limit
end
while set <= #queues do
  local q = queues[set]
  local is_over
  if q then is_over = look(q[2] .. 'z', q[1], 1) else is_over = look(DELAYED, '', 1000) end
  if not is_over then return {arr(found), set, skip} end
  set, skip = set + 1, 0
end
return {arr(found), -1, -1}
