-- In: now, session, record, queues. Out: nothing.
--! include brokers/redis/lua/messages.lua

local text, session, record, queues = unpack(unpacked)
local now = now_of(text)
key_type('mpy:queues', 'set')
for _, q in ipairs(queues) do
  if pcall(key_type, q[2] .. 's', 'zset') then
    call('SADD', 'mpy:queues', q[1])
    call('SET', q[2] .. 'b:' .. session, record)
    call('ZADD', q[2] .. 's', now, session)
  end
end
