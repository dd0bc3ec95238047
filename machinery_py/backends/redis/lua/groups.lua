-- Members that arrive in their groups.
--
-- has_fired: whether the chord of this group is settled.
-- arrive: adds a member, or with its arrival those of others that differ in nothing else.
-- note_groups: writes what follows from the arrivals of a script, once for each group.
--! include backends/redis/lua/documents.lua

local fired, arrived = {}, {}
local function has_fired(uuid)
  if fired[uuid] == nil then fired[uuid] = call('HGET', (group_keys(uuid)), 'fired') end
  return fired[uuid]
end
local function arrive(a, members)
  local uuid, member = a[$GROUP], a[$MEMBER]
  local _, h = group_keys(uuid)
  if call('SADD', h, unpack(members or {member})) == 0 then return end
  local group = arrived[uuid] or {}
  group.total, group.callback = a[$TOTAL], a[$CALLBACK]
  if not a[$OK] then group.failed = group.failed or member end
  arrived[uuid] = group
end
local function note_group(uuid, a, now)
  local g, h = group_keys(uuid)
  local first = call('HSET', g, 'total', a.total, 'callback', a.callback) == 2
  if a.failed then call('HSETNX', g, 'failed', a.failed) end
  local complete = a.failed or call('HEXISTS', g, 'failed') == 1 or (a.total > 0 and call('SCARD', h) >= a.total)
  if a.callback ~= '' and not has_fired(uuid) and complete then
    call('ZADD', 'mpy:ready', 0, uuid)
    try('ZREM', 'mpy:partial', uuid)
    call('PERSIST', g)
    call('PERSIST', h)
  elseif not call('ZSCORE', 'mpy:ready', uuid) then
    call('EXPIRE', g, $LONG)
    call('EXPIRE', h, $LONG)
    if first and a.callback ~= '' and not has_fired(uuid) then call('ZADD', 'mpy:partial', int(now + $LEFT), uuid) end
  end
end
local function note_groups(now)
  for uuid, a in pairs(arrived) do note_group(uuid, a, now) end
  arrived = {}
end
