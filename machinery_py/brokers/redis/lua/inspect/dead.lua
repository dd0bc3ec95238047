-- In: queues, limit. Out: for each the newest dead letters (id, letter).
--! include connections/redis/lua/prelude.lua

local queues, limit, found = unpacked[1], unpacked[2], {}
for i, q in ipairs(queues) do
  found[i] = {}
  for _, id in ipairs(call('ZREVRANGE', q[2] .. 'e', 0, limit - 1)) do
    table.insert(found[i], {id, call('HGET', q[2] .. 'd', id)})
  end
end
return found
