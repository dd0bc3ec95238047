-- keep: keeps checkpoints of a task under its key, names and contents in turn, for so many seconds.
-- Returns s; or c: one of the names is there, and nothing was written.
--! include connections/redis/lua/prelude.lua

local function keep(key, life, fields)
  key_type(key, 'hash')
  for i = 1, #fields, 2 do
    if call('HEXISTS', key, fields[i]) == 1 then return 'c' end
  end
  rows('HSET', key, fields)
  call('EXPIRE', key, life)
  return 's'
end
