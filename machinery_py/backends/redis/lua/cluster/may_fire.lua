-- Takes the place of may_fire of changes.lua. Go's mutex is in a slot of its own: whoever wants to
-- fire a group has flagged its document first (flag.lua), and looked at the mutex then.
--! include backends/redis/lua/changes.lua

may_fire = function(uuid)
  key_type((group_keys(uuid)), 'hash')
  local doc = group_doc(uuid)
  if (not doc and call('EXISTS', (group_keys(uuid))) == 0) or has_fired(uuid) then return false end
  if not doc or call('HGET', (group_keys(uuid)), 'failed') then return true end
  return string.find(doc, '$FLAG', 1, true) or not string.find(doc, '"ChordTriggered":', 1, true)
end
