-- In: (body, score). Out: nothing. A member whose score has changed was put there anew. Scores are
-- compared as numbers: Redis 7 writes 1.79e+18, Redis 8 all digits.
--! include connections/redis/lua/prelude.lua

for _, one in ipairs(unpacked[1]) do
  local score = redis.call('ZSCORE', '$DELAYED', one[1])
  if tonumber(score) == tonumber(one[2]) then redis.call('ZREM', '$DELAYED', one[1]) end
end
