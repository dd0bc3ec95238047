-- In: keys of sets, the place behind which to begin (µs, or "": at the newest; UUID), down to which
-- µs, how many of each. Out: for each set UUID and µs in turn, the newest first.
--! include backends/redis/lua/listing.lua

local found = {}
for i, key in ipairs(unpacked[1]) do found[i] = stretch(key, unpack(unpacked, 2)) end
return found
