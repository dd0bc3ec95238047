-- A claim is kept behind the key of the record of what was sent with it, and the length of that, in
-- four bytes.
--
-- In: now, key of the claim, expected, body, life, key of the record, record or "", µs of its note.
-- Out: as of AMEND.
--! include connections/redis/lua/prelude.lua

local text, claim, expected, body, life, key, record, noted = unpack(unpacked)
if record ~= '' and now_of(text) > noted + $NOTED then return 'l' end
local kept, head, holds = call('GET', claim), '\0\0\0\0', ''
if kept then
  local size = struct.unpack('>I4', kept)
  head, holds = string.sub(kept, 1, 4 + size), string.sub(kept, 5 + size)
end
if holds ~= expected then return 'f' end
if record ~= '' then
  call('SET', key, record)
  head = struct.pack('>I4', #key) .. key
end
if body == '' then call('DEL', claim) else call('SET', claim, head .. body, 'EX', int(life)) end
return 's'
