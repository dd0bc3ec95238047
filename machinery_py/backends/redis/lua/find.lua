-- In: sets, the place behind which to begin (µs, or "": at the newest; UUID), down to which µs, how
-- many of each set to look at, how many to find in it, words of states (none: any), name as JSON or
-- "". Out: for each set, the later one first, how many were looked at; the place (UUID, µs) of the
-- last of these, or nothing if no more is of use; the place of each that was found; msgpack of
-- (document, companion) of each. It looks at $BYTES of documents of a set at most. The filter may let pass too much, never too little.
--! include backends/redis/lua/changes.lua
--! include backends/redis/lua/listing.lua

local sets, at, uuid, low, size, limit, wanted, name = unpack(unpacked)
for i, word in ipairs(wanted) do wanted[i] = '"State":"' .. word .. '"' end
local function fits(doc)
  local is_wanted = #wanted == 0
  for _, word in ipairs(wanted) do is_wanted = is_wanted or string.find(doc, word, 1, true) end
  if not is_wanted or name == '' then return is_wanted end
  local _, at = string.find(doc, '"TaskName":', 1, true)
  return at and string.sub(doc, at + 1, at + #name) == name
end
local stretches, replies = {}, {}
for i, set in ipairs(sets) do stretches[i] = stretch(set, at, uuid, low, size) end
-- The later of two stretches is of use as far as the end of the other.
table.sort(stretches, function(one, other) return tonumber(one[2] or 0) > tonumber(other[2] or 0) end)
for i, listed in ipairs(stretches) do
  local looked, places, found, bytes = 0, {}, {}, 0
  while #found < limit and bytes < $BYTES and 2 * looked < #listed and tonumber(listed[2 * looked + 2]) >= low do
    local keys, theirs = {}, {}
    for i = 2 * looked + 1, math.min(2 * looked + 2 * $AT_ONCE, #listed), 2 do keys[#keys + 1] = doc_key(listed[i]) end
    for i, doc in ipairs(call('MGET', unpack(keys))) do
      bytes = bytes + #(doc or '')
      if doc and fits(doc) then
        local row = 2 * (looked + i) - 1
        theirs[#theirs + 1] = companion(listed[row])
        places[#places + 1] = {listed[row], listed[row + 1]}
        found[#found + 1] = '\146' .. bin(doc)
      end
    end
    for i, ours in ipairs(#theirs > 0 and call('MGET', unpack(theirs)) or {}) do
      local place = #found - #theirs + i
      bytes = bytes + #(ours or '')
      found[place] = found[place] .. bin(ours)
    end
    looked = looked + #keys
  end
  local more = looked > 0 and (2 * looked < #listed or looked == size)
  if more then low = math.max(low, tonumber(listed[2 * looked])) end
  replies[i] = {looked, more and {listed[2 * looked - 1], listed[2 * looked]}, places, arr(found)}
end
return replies
