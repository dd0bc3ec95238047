-- A submission in steps: `mpy:staged:<token>` has the arguments of each step by its number, and in
-- `next` the number of the one that comes next, once one was carried out.
--
-- complete: raises if a submission has not so many steps any more: its sender took too long.
-- adopt: from now on it will be carried out, whoever does it.
--! include connections/redis/lua/prelude.lua

local function staged(token) return 'mpy:staged:' .. token end
local function complete(token, count)
  key_type('mpy:committed', 'zset')
  if call('HLEN', staged(token)) ~= count then error('TRYAGAIN ' .. staged(token) .. ' has expired') end
end
local function adopt(token, now)
  call('ZADD', 'mpy:committed', int(now), token)
  call('PERSIST', staged(token))
end
