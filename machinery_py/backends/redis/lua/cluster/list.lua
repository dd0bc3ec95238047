-- In: now, finished UUIDs, what state and queue each finished with, others, whether they may have
-- been finished. Out: nothing.
--! include connections/redis/lua/prelude.lua

local prefix = string.sub(KEYS[1], 1, -2)
local text, done, names, open, replayed = unpack(unpacked)
local now = now_of(text)
local stamp, rate = int(now), prefix .. 'rate:' .. int(math.floor(now / 1000000))
key_type(prefix .. 'open', 'zset')
key_type(prefix .. 'done', 'zset')
key_type(rate, 'hash')
for i, uuid in ipairs(done) do
  call('ZREM', prefix .. 'open', uuid)
  if call('ZADD', prefix .. 'done', stamp, uuid) == 1 then
    call('HINCRBY', rate, names[i], 1)
    call('EXPIRE', rate, $RATES)
  end
end
for _, uuid in ipairs(open) do
  if replayed then call('ZREM', prefix .. 'done', uuid) end
  if not call('ZSCORE', prefix .. 'done', uuid) then call('ZADD', prefix .. 'open', stamp, uuid) end
end
