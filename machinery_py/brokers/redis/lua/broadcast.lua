-- In: now, key of the topic, ttl in ms, records. Out: nothing.
-- The id of an entry is its time in ms and its running number, from 1: a reader sees gaps, and what
-- is old. `u` is the ms at which the record is over, `r` its bytes.
--! include connections/redis/lua/prelude.lua

local text, key, ttl, records = unpack(unpacked)
local now, number = math.floor(now_of(text) / 1000), 0
key_type(key, 'stream')
local ms = now
local last = call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
if last then
  local before, count = string.match(last[1], '(%d+)-(%d+)')
  ms, number = math.max(now, tonumber(before)), tonumber(count)
elseif call('EXISTS', key) == 1 then
  call('DEL', key) -- it is empty, and remembers a last id, which may be any
end
local over = int(now + ttl)
for _, record in ipairs(records) do
  number = number + 1
  local id = int(ms) .. '-' .. int(number)
  call('XADD', key, 'MAXLEN', '~', $LENGTH, id, 'u', over, 'r', record)
end
if call('PTTL', key) < ttl then call('PEXPIRE', key, int(ttl)) end
