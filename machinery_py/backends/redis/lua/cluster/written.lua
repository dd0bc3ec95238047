-- written: what was written, for the listings.
--! include backends/redis/lua/changes.lua

-- What was written, for the listings.

local function written()
  local names = {}
  for name, count in pairs(rates) do names[#names + 1] = name end
  return {done, open, names}
end
