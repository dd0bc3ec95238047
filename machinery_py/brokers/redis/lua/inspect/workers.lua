-- In: queues. Out: for each (session, beat in µs, how many it holds, record or nil).
--! include brokers/redis/lua/messages.lua

local lines = {}
for i, q in ipairs(unpacked[1]) do
  lines[i] = {}
  local found = try('ZRANGE', q[2] .. 's', 0, -1, 'WITHSCORES') or {}
  for j = 1, #found, 2 do
    table.insert(lines[i], {found[j], int(tonumber(found[j + 1])), call('HLEN', q[2] .. 'f:' .. found[j]),
      call('GET', q[2] .. 'b:' .. found[j])})
  end
end
return lines
