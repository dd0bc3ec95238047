-- Keys of tasks and groups.
--! include connections/redis/lua/prelude.lua

local function doc_key(uuid)
  if #uuid > 2 then return uuid end
  return 'mpy:k:{' .. uuid .. '}'
end
local function companion(uuid) return 'mpy:m:{' .. uuid .. '}' end
local function group_keys(uuid) return 'mpy:g:{' .. uuid .. '}', 'mpy:h:{' .. uuid .. '}' end
