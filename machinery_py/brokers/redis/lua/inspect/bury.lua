-- In: now, queue, head of the dead letter, label, body. Out: nothing. A message that was never on a
-- list becomes a dead letter.
--! include brokers/redis/lua/messages.lua

local text, q, head, label, body = unpack(unpacked)
key_type(q[2] .. 'd', 'hash')
key_type(q[2] .. 'e', 'zset')
counter(q[2] .. 'n')
try('SADD', 'mpy:queues', q[1])
bury(q, wrap(0, 0, 0, 0, 0, label, body), now_of(text), head)
