-- In: at most 1000 UUIDs; true if only Go's documents are wanted. Out: msgpack of (document or nil,
-- companion or nil), for each of the first that are no larger than $BYTES; at least for one.
--! include backends/redis/lua/changes.lua

local uuids, bare = unpack(unpacked)
local keys, found, each, count, size = {}, {}, bare and 1 or 2, 0, 0
for i, uuid in ipairs(uuids) do
  local doc, kept = doc_key(uuid), not bare and companion(uuid)
  size = size + (try('STRLEN', doc) or 0) + (kept and try('STRLEN', kept) or 0)
  if size > $BYTES and i > 1 then break end
  count, keys[(i - 1) * each + 1] = i, doc
  if kept then keys[2 * i] = kept end
end
local function add(text)
  if text then found[#found + 1] = bin_head(text) end
  found[#found + 1] = text or '\192'
end
local kept = #keys > 0 and call('MGET', unpack(keys)) or {}
for i = 1, count do
  found[#found + 1] = '\146'
  add(kept[(i - 1) * each + 1])
  add(not bare and kept[2 * i])
end
return '\221' .. struct.pack('>I4', count) .. table.concat(found)
