-- Takes the place of the line `local call = redis.call` in a script for a cluster: the keys that
-- belong to no queue are those of its slot.

local PREFIX = string.sub(KEYS[1], 1, -2)
local OURS = {$OURS}
local function call(command, key, ...)
  if not key then return redis.call(command) end
  if OURS[key] or string.sub(key, 1, 6) == 'mpy:p:' then key = PREFIX .. key end
  return redis.call(command, key, ...)
end
