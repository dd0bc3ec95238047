-- stretch(set, at, uuid, low, size): what a sorted set holds behind the place (µs, UUID), the newest
-- first: UUID and µs in turn. at "": from the newest on. low: down to which µs.
--! include connections/redis/lua/prelude.lua

local function is_lower(one, other)
  -- Bytes, as sorted sets have it; Lua compares by the server's locale.
  for i = 1, #other do
    local a, b = string.byte(one, i), string.byte(other, i)
    if a ~= b then return not a or a < b end
  end
  return false
end
local function stretch(set, at, uuid, low, size)
  local first = 0
  if at ~= '' then
    local last = call('ZCOUNT', set, at, '+inf')
    first = call('ZCOUNT', set, '(' .. at, '+inf')
    while first < last do
      local middle = math.floor((first + last) / 2)
      if is_lower(call('ZREVRANGE', set, int(middle), int(middle))[1], uuid) then last = middle else first = middle + 1 end
    end
  end
  local listed = call('ZREVRANGE', set, int(first), int(first + size - 1), 'WITHSCORES')
  for i = #listed, 2, -2 do
    if tonumber(listed[i]) >= low then break end
    listed[i], listed[i - 1] = nil, nil
  end
  return listed
end
