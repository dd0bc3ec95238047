-- Count of Go's delayed set in steps: `start` is where to begin, the last due first; `size` is how many
-- to look at, no more behind $BYTES. Returns how many were looked at; their routing keys as they stand in the JSON, and how many
-- each: those that are not due yet, and those that are. From the end: what is moved to its queue
-- meanwhile shifts no other.
local function late_names(start, size, now)
  local counts, names = {}, {}
  key_type('$DELAYED', 'zset')
  local late = call('ZCOUNT', '$DELAYED', '(' .. int(now) .. '000', '+inf')
  local looked, bytes, step = 0, 0, 1
  while looked < size and bytes < $BYTES do
    local most = math.min(step, size - looked)
    local bodies = call('ZREVRANGE', '$DELAYED', start + looked, start + looked + most - 1)
    for i, body in ipairs(bodies) do
      local name = string.match(body, '"RoutingKey":("[^"]*")') or ''
      local count = counts[name] or {0, 0}
      local kind = start + looked + i <= late and 1 or 2
      count[kind] = count[kind] + 1
      counts[name] = count
      bytes = bytes + #body
    end
    looked = looked + #bodies
    if #bodies < most then break end
    step = math.min(2 * step, $AT_ONCE)
  end
  for name, count in pairs(counts) do names[#names + 1] = {name, count[1], count[2]} end
  return {looked, names}
end
