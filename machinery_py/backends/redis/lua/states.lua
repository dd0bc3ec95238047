-- In: at most 1000 UUIDs; true if only Go's documents are wanted. Out: msgpack of (document or nil,
-- companion or nil), for each.
--! include backends/redis/lua/changes.lua

local uuids, bare = unpack(unpacked)
local keys, found, each = {}, {}, bare and 1 or 2
for i, uuid in ipairs(uuids) do
  keys[(i - 1) * each + 1] = doc_key(uuid)
  if not bare then keys[2 * i] = companion(uuid) end
end
local function add(text)
  if text then found[#found + 1] = bin_head(text) end
  found[#found + 1] = text or '\192'
end
local kept = #keys > 0 and call('MGET', unpack(keys)) or {}
for i = 1, #uuids do
  found[#found + 1] = '\146'
  add(kept[(i - 1) * each + 1])
  add(not bare and kept[2 * i])
end
return '\221' .. struct.pack('>I4', #uuids) .. table.concat(found)
