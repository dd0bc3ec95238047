-- In: keys of outboxes. Out: what is in each of the first that are no larger than $BYTES, at least in
-- one; "" if nothing is.
--! include connections/redis/lua/prelude.lua

local found, size = {}, 0
for i, key in ipairs(unpacked[1]) do
  size = size + (try('STRLEN', key) or 0)
  if size > $BYTES and i > 1 then break end
  found[i] = try('GET', key) or ''
end
return found
