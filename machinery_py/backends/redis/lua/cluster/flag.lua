-- In: group. Out: 1 if Go may be at it as well, which its mutex tells; 2 if Go has settled it, or
-- is at it; else 0.
--! include backends/redis/lua/changes.lua

local uuid = unpacked[1]
local doc = group_doc(uuid)
if not doc or has_fired(uuid) or call('HGET', (group_keys(uuid)), 'failed') then return 0 end
if string.find(doc, '$FLAG', 1, true) then return 1 end
local from, to = string.find(doc, '"ChordTriggered":false', 1, true)
if not from then return string.find(doc, '"ChordTriggered":true', 1, true) and 2 or 0 end
call('SET', doc_key(uuid), string.sub(doc, 1, from - 1) .. '$FLAG' .. string.sub(doc, to + 1), 'KEEPTTL')
return 1
