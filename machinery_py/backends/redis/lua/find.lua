-- In: set, from which µs down ("+inf": the newest), how many of that µs to skip, down to which µs,
-- how many to look at, how many to find, state or "", name as JSON or "". Out: how many were looked
-- at; the first two for the next call; the µs of each that was found; msgpack of (document,
-- companion) of each. The filter may let pass too much, never too little.
--! include backends/redis/lua/changes.lua

local set, high, skip, low, size, limit, word, name = unpack(unpacked)
local listed = call('ZREVRANGEBYSCORE', set, high, low, 'WITHSCORES', 'LIMIT', skip, size)
local looked, times, found = 0, {}, {}
local function fits(doc)
  if word ~= '' and not string.find(doc, '"State":"' .. word .. '"', 1, true) then return false end
  if name == '' then return true end
  local _, at = string.find(doc, '"TaskName":', 1, true)
  return at and string.sub(doc, at + 1, at + #name) == name
end
while 2 * looked < #listed and #found < limit do
  local keys, theirs = {}, {}
  for i = 2 * looked + 1, math.min(2 * looked + 200, #listed), 2 do keys[#keys + 1] = doc_key(listed[i]) end
  for i, doc in ipairs(call('MGET', unpack(keys))) do
    if doc and fits(doc) then
      local row = 2 * (looked + i) - 1
      theirs[#theirs + 1] = companion(listed[row])
      times[#times + 1] = int(tonumber(listed[row + 1]))
      found[#found + 1] = '\146' .. bin(doc)
    end
  end
  for i, ours in ipairs(#theirs > 0 and call('MGET', unpack(theirs)) or {}) do
    local place = #found - #theirs + i
    found[place] = found[place] .. bin(ours)
  end
  looked = looked + #keys
end
local last, same = looked > 0 and int(tonumber(listed[2 * looked])) or high, 0
for i = 2 * looked, 2, -2 do
  if int(tonumber(listed[i])) ~= last then break end
  same = same + 1
end
return {looked, last, last == high and skip + same or same, times, arr(found)}
