-- In: seconds that finished states are kept. Out: 1 if it did a step: of one large group that was
-- settled, some members expire from now on, and with the last of them the group.
--! include backends/redis/lua/changes.lua

local expire = int(unpacked[1])
local listed = try('SSCAN', 'mpy:loose', 0)
local uuid = listed and listed[2][1]
if not uuid then return 0 end
local g, h = group_keys(uuid)
local fine, cursor, members = pcall(function()
  return unpack(call('SSCAN', h, call('HGET', g, 'loosened') or '0', 'COUNT', $MANY))
end)
if fine and #members > 0 then
  local keys, ours = {}, {}
  for i, member in ipairs(members) do keys[i] = doc_key(member) end
  for i, doc in ipairs(call('MGET', unpack(keys))) do
    if doc and is_of(members[i], doc, '{"TaskUUID":"', ',"TaskName":') then ours[#ours + 1] = members[i] end
  end
  loosen(ours, expire)
end
if fine and cursor ~= '0' then
  call('HSET', g, 'loosened', cursor)
else
  call('SREM', 'mpy:loose', uuid)
  call('EXPIRE', g, expire)
  call('EXPIRE', h, expire)
end
return 1
