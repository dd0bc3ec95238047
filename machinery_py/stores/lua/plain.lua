-- What is written of new tasks in the plain case: for one queue, none of them delayed.
--
-- items: UUID, document, companion and seconds kept of each state, one behind the other; `first` is
-- the place of the first one. To make a table of each would cost more than all else.
--
-- is_new: whether nothing lies under the keys of these states, nor under those that `keys` has. Of
-- UUIDs alone, `width` is 1.
-- write_new: writes states of which nothing is there, and lists them.
--! include brokers/redis/lua/giving.lua

local function is_new(items, first, states, width, keys)
  for at = first, first + width * states - 1, width do
    keys[#keys + 1] = items[at]
    keys[#keys + 1] = 'mpy:m:{' .. items[at] .. '}'
  end
  return call('EXISTS', unpack(keys)) == 0
end
local function write_new(items, first, states, now)
  local listed, stamp = {}, int(now)
  for at = first, first + 4 * states - 1, 4 do
    call('SET', items[at], items[at + 1], 'EX', items[at + 3])
    call('SET', 'mpy:m:{' .. items[at] .. '}', items[at + 2], 'EX', items[at + 3])
    listed[#listed + 1] = stamp
    listed[#listed + 1] = items[at]
  end
  pcall(rows, 'ZADD', 'mpy:open', listed)
end
