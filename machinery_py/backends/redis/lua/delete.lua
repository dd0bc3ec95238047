-- In: (UUID, seconds that its end is kept) for each task, key of the finished ones or "". Out: UUIDs
-- of those that are finished, and are kept no longer because of a chord; they are deleted.
--! include backends/redis/lua/changes.lua

local rows, set = unpack(unpacked)
local uuids, gone = {}, {}
for i, row in ipairs(rows) do uuids[i] = row[1] end
look(uuids)
if set ~= '' then key_type(set, 'zset') end
local function is_held(uuid, life)
  -- A life as long as that of a chord hides in it; its own is then kept beside it.
  return call('TTL', doc_key(uuid)) > life or (life >= $LONG and call('EXISTS', life_key(uuid)) == 1)
end
for _, row in ipairs(rows) do
  local uuid, word = row[1], known[row[1]].word
  if (word == 'SUCCESS' or word == 'FAILURE') and not is_held(uuid, row[2]) then
    call('DEL', doc_key(uuid), companion(uuid))
    if set ~= '' then call('ZREM', set, uuid) end
    gone[#gone + 1] = uuid
  end
end
return gone
