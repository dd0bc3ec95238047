-- Store PENDING and queue the messages. KEYS: queue. ARGV: (id, state, message) of each
local messages = {}
for i = 1, #ARGV / 3 do
  redis.call('SET', ARGV[3 * i - 2], ARGV[3 * i - 1], 'EX', 3600)
  messages[i] = ARGV[3 * i]
end
redis.call('RPUSH', KEYS[1], unpack(messages))
