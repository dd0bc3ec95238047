-- Count of Go's delayed set in steps: `start` is where to begin, the last due first; `size` is how many
-- to look at. Returns how many there were; their routing keys as they stand in the JSON, and how many
-- each: those that are not due yet, and those that are. From the end: what is moved to its queue
-- meanwhile shifts no other.
local function late_names(start, size, now)
  local counts, names = {}, {}
  key_type('$DELAYED', 'zset')
  local late = call('ZCOUNT', '$DELAYED', '(' .. int(now) .. '000', '+inf')
  local bodies = call('ZREVRANGE', '$DELAYED', start, start + size - 1)
  for i, body in ipairs(bodies) do
    local name = string.match(body, '"RoutingKey":("[^"]*")') or ''
    local count = counts[name] or {0, 0}
    local kind = start + i <= late and 1 or 2
    count[kind] = count[kind] + 1
    counts[name] = count
  end
  for name, count in pairs(counts) do names[#names + 1] = {name, count[1], count[2]} end
  return {#bodies, names}
end
