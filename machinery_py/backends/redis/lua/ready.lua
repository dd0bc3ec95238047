-- In: limit. Out: (group, callback, failed member or ""), none behind $BYTES of callbacks; texts that name
-- keys of groups under which something else lies: these groups are left out.
--! include backends/redis/lua/changes.lua

local limit, found, spoilt, at, size = unpacked[1], {}, {}, 0, 0
key_type('mpy:ready', 'zset')
repeat
  local uuids = call('ZRANGE', 'mpy:ready', at, at + limit - 1)
  for _, uuid in ipairs(uuids) do
    local g = group_keys(uuid)
    local kept = try('HMGET', g, 'callback', 'failed')
    if not kept then
      spoilt[#spoilt + 1] = select(2, pcall(key_type, g, 'hash'))
    elseif #found < limit and size < $BYTES then
      size = size + #(kept[1] or '')
      found[#found + 1] = {uuid, kept[1] or '', kept[2] or ''}
    end
  end
  at = at + limit
until #uuids < limit or #found == limit or size >= $BYTES
return {found, spoilt}
