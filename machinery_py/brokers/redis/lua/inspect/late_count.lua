-- Count of Go's delayed set in steps: `start` is where to begin, the last due first; `size` is how many
-- to look at. Returns how many there were; their routing keys as they stand in the JSON, and how many
-- each. From the end: what is moved to its queue meanwhile shifts no other.
local function late_names(start, size)
  local counts, names = {}, {}
  key_type('$DELAYED', 'zset')
  local bodies = call('ZREVRANGE', '$DELAYED', start, start + size - 1)
  for _, body in ipairs(bodies) do
    local name = string.match(body, '"RoutingKey":("[^"]*")') or ''
    counts[name] = (counts[name] or 0) + 1
  end
  for name, count in pairs(counts) do names[#names + 1] = {name, count} end
  return {#bodies, names}
end
