-- In: queue, limit, how many to leave out. Out: msgpack of (priority, note or nil, body), the next first;
-- none behind $BYTES of bodies.
--! include brokers/redis/lua/messages.lua

local q, limit, skip = unpack(unpacked)
local found, size = {}, 0
local function look(count, ask, add)
  local at, step = math.min(skip, count), 1
  skip = skip - at
  while at < count and #found < limit and size < $BYTES do
    local items = ask(at, at + math.min(step, limit - #found) - 1)
    for _, item in ipairs(items) do
      add(item)
      size = size + #item
    end
    if #items == 0 then break end
    at, step = at + #items, math.min(2 * step, $AT_ONCE)
  end
end
local function list(key, level)
  look(call('LLEN', key), function(from, to) return call('LRANGE', key, from, to) end, function(body)
    local noted = call('HGET', q[2] .. 'a', redis.sha1hex(body))
    found[#found + 1] = '\147' .. cmsgpack.pack(level) .. bin(noted) .. bin(body)
  end)
end
for _, level in ipairs(call('ZREVRANGE', q[2] .. 'l', 0, -1)) do
  if level == 'fair' then
    local key = q[2] .. 'p:fair'
    look(call('ZCARD', key), function(from, to) return call('ZRANGE', key, from, to) end, function(text)
      local m = unwrap(text)
      local noted = table.concat({m.fence, m.strikes, m.parks}, ' ') .. '\n' .. m.label
      found[#found + 1] = '\147' .. cmsgpack.pack(m.level) .. bin(noted) .. bin(m.body)
    end)
  else
    list(q[2] .. 'p:' .. level, tonumber(level))
  end
end
list(q[1], 0)
return arr(found)
