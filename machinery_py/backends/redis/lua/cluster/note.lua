-- In: now, keys. Out: µs of each note, later than those of an earlier one. Each has a record, soon.
--! include connections/redis/lua/prelude.lua

local prefix = string.sub(KEYS[1], 1, -2)
local now, stamps = now_of(unpacked[1]), {}
for i, key in ipairs(unpacked[2]) do
  local stamp = int(math.max(now, tonumber(call('ZSCORE', prefix .. 'outbox', key) or '0') + 1))
  call('ZADD', prefix .. 'outbox', stamp, key)
  stamps[i] = stamp
end
return stamps
