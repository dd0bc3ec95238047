-- Store what ended, publish what follows, and claim the next messages: all in one call.
--
-- KEYS: queue, in flight, arrivals, heartbeat
-- ARGV: wanted, number of the first claimed, then how many of each follow:
--       settled numbers; (id, state) of each; messages to queue; (group, value); (channel, state)
-- Out:  the claimed messages
local wanted, first = tonumber(ARGV[1]), tonumber(ARGV[2])
local settled, queued, arrived = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local at = 6
if settled > 0 then
  redis.call('HDEL', KEYS[2], unpack(ARGV, at, at + settled - 1))
  at = at + settled
  for _ = 1, settled do
    redis.call('SET', ARGV[at], ARGV[at + 1], 'EX', 3600)
    at = at + 2
  end
end
if queued > 0 then
  redis.call('RPUSH', KEYS[1], unpack(ARGV, at, at + queued - 1))
  at = at + queued
end
for _ = 1, arrived do
  local group = ARGV[at]
  redis.call('RPUSH', 'ceiling:g:' .. group, ARGV[at + 1])
  at = at + 2
  if redis.call('DECR', 'ceiling:gc:' .. group) == 0 then
    redis.call('RPUSH', KEYS[1], redis.call('GET', 'ceiling:gb:' .. group))
    redis.call('DEL', 'ceiling:gc:' .. group, 'ceiling:gb:' .. group)
  end
end
while ARGV[at] do
  redis.call('PUBLISH', ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.call('SET', KEYS[4], '1', 'PX', 5000)
if wanted == 0 then return {} end
local claimed = redis.call('LRANGE', KEYS[3], 0, -1)
if #claimed > 0 then
  redis.call('DEL', KEYS[3])
else
  claimed = redis.call('LPOP', KEYS[1], wanted) or {}
end
if #claimed > 0 then
  local held = {}
  for i = 1, #claimed do
    held[2 * i - 1], held[2 * i] = first + i - 1, claimed[i]
  end
  redis.call('HSET', KEYS[2], unpack(held))
end
return claimed
