-- In: now, seconds that finished states are kept. Out: how many groups were looked at, and whether
-- members of settled ones are still to expire (loosen.lua). What is kept under a group's UUID and is no document is left alone; MGET says that it is missing.
--! include backends/redis/lua/changes.lua

local text, expire = unpack(unpacked)
local now = now_of(text)
for _, name in ipairs({'ready', 'partial', 'groups'}) do key_type('mpy:' .. name, 'zset') end
try('ZREMRANGEBYSCORE', 'mpy:revoked', '-inf', now)
try('ZREMRANGEBYSCORE', 'mpy:done', '-inf', now - expire * 1000000)
try('ZREMRANGEBYSCORE', 'mpy:open', '-inf', now - 2 * $LONG * 1000000)
local due = call('ZRANGEBYSCORE', 'mpy:groups', '-inf', now, 'LIMIT', 0, $LOOKS)
for _, uuid in ipairs(due) do
  local g, h = group_keys(uuid)
  local doc, alive = call('MGET', doc_key(uuid))[1], call('ZSCORE', 'mpy:ready', uuid)
  if doc and not is_group(uuid, doc) then doc = false end
  if doc and not alive then
    -- Our own document of a group holds names only: no number can suffer.
    local read, group = pcall(cjson.decode, doc)
    local members = read and type(group.TaskUUIDs) == 'table' and group.TaskUUIDs or {}
    for start = 1, #members, 1000 do
      local keys = {}
      for i = start, math.min(start + 999, #members) do keys[#keys + 1] = doc_key(members[i]) end
      if call('EXISTS', unpack(keys)) > 0 then alive = true break end
    end
  end
  if alive then
    call('ZADD', 'mpy:groups', now + expire * 1000000, uuid)
    if doc then call('EXPIRE', doc_key(uuid), $LONG) end
  else
    call('DEL', g, h)
    if doc then call('DEL', doc_key(uuid)) end
    call('ZREM', 'mpy:groups', uuid)
    call('ZREM', 'mpy:partial', uuid)
  end
end
return {#due, call('EXISTS', 'mpy:loose')}
