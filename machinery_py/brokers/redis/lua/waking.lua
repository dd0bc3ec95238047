-- Who is told that there is something to claim: clients that block, or are about to.
--
-- `v` of a queue has the clients whose last claim found nothing, `w` those of them that block at another
-- queue. A client looks whether it is still in `v` in the packet with which it blocks: so none that is
-- taken out here sleeps on. It is the number of its connection, in the life of the server that `life`
-- names: a restarted server gives the same numbers to other programs.
--
-- wake: takes `count` clients out; they are to be woken, `number.life` each.
--! include connections/redis/lua/prelude.lua

local function wake(q, set, count, to_wake)
  local found = try('SPOP', q[2] .. set, count) or {}
  if #found == 0 then return end
  local life = try('GET', q[2] .. 'life')
  for _, client in ipairs(found) do
    try('SREM', q[2] .. (set == 'v' and 'w' or 'v'), client)
    to_wake[#to_wake + 1] = life and client .. '.' .. life or client
  end
end
