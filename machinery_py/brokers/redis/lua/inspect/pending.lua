-- In: queue, limit. Out: msgpack of (priority, note or nil, body), the next first.
--! include brokers/redis/lua/messages.lua

local q, limit, found = unpacked[1], unpacked[2], {}
local function list(key, level)
  if #found < limit then
    for _, body in ipairs(call('LRANGE', key, 0, limit - #found - 1)) do
      local noted = call('HGET', q[2] .. 'a', redis.sha1hex(body))
      found[#found + 1] = '\147' .. cmsgpack.pack(level) .. bin(noted) .. bin(body)
    end
  end
end
for _, level in ipairs(call('ZREVRANGE', q[2] .. 'l', 0, -1)) do
  if level == 'fair' and #found < limit then
    for _, text in ipairs(call('ZRANGE', q[2] .. 'p:fair', 0, limit - #found - 1)) do
      local m = unwrap(text)
      local noted = table.concat({m.fence, m.strikes, m.parks}, ' ') .. '\n' .. m.label
      found[#found + 1] = '\147' .. cmsgpack.pack(m.level) .. bin(noted) .. bin(m.body)
    end
  elseif level ~= 'fair' then
    list(q[2] .. 'p:' .. level, tonumber(level))
  end
end
list(q[1], 0)
return arr(found)
