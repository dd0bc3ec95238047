-- A claim is kept behind the key of the record of what was sent with it, and the length of that, in
-- four bytes.
--
-- In: key of the claim. Out: what it holds, or nil; the record of what was sent with it, if that is
-- not done with, or nil.
--! include connections/redis/lua/prelude.lua

local kept = call('GET', unpacked[1])
if not kept then return {false, false} end
local size = struct.unpack('>I4', kept)
return {string.sub(kept, 5 + size), size > 0 and call('GET', string.sub(kept, 5, 4 + size))}
