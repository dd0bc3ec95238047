-- What we keep of a message: in flight, parked, or in a fair queue. Numbers, the size of its label, and behind
-- them label and body as they came. Of one in flight the number is that of its claim. messages.py reads it as well.
--
-- wrap: makes an entry. unwrap: its parts.
--! include connections/redis/lua/prelude.lua

local function wrap(number, level, fence, strikes, parks, label, body)
  return table.concat({number, level, fence, strikes, parks, #label}, ' ') .. '\n' .. label .. body
end
local function unwrap(text)
  local number, level, fence, strikes, parks, size, at = string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)\n()')
  size = tonumber(size)
  return {number = number, level = tonumber(level), fence = tonumber(fence), strikes = tonumber(strikes),
          parks = tonumber(parks), label = string.sub(text, at, at + size - 1), body = string.sub(text, at + size)}
end
