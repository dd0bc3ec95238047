-- A claim is kept behind the key of the record of what was sent with it, and the length of that, in
-- four bytes.
--
-- In: key of the claim, body. Out: nothing.
--! include connections/redis/lua/prelude.lua

local kept = call('GET', unpacked[1])
if kept and string.sub(kept, 5 + struct.unpack('>I4', kept)) == unpacked[2] then call('DEL', unpacked[1]) end
