-- In: (body, score). Out: nothing. A member whose score has changed was put there anew.
--! include connections/redis/lua/prelude.lua

for _, one in ipairs(unpacked[1]) do
  if redis.call('ZSCORE', '$DELAYED', one[1]) == one[2] then redis.call('ZREM', '$DELAYED', one[1]) end
end
