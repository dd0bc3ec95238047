-- In: queues, limit. Out: msgpack of (queue or "" for Go's set, due in µs, member).
--! include brokers/redis/lua/messages.lua

local queues, limit, found = unpacked[1], unpacked[2], {}
local function look(key, name, unit)
  local rows = call('ZRANGE', key, 0, limit - 1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local due = math.floor(tonumber(rows[i + 1]) / unit + 0.5)
    found[#found + 1] = '\147' .. bin(name) .. cmsgpack.pack(due) .. bin(rows[i])
  end
end
look(DELAYED, '', 1000)
for _, q in ipairs(queues) do look(q[2] .. 'z', q[1], 1) end
return arr(found)
