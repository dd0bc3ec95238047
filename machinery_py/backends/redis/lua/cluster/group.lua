-- In: group, document. Out: nothing.
--! include backends/redis/lua/changes.lua

local uuid, doc = unpack(unpacked)
key_type((group_keys(uuid)), 'hash')
if not group_doc(uuid) and is_queue(uuid) then error('WRONGTYPE ' .. uuid .. ' is a queue, not a group') end
if call('HGET', (group_keys(uuid)), 'fired') then doc = triggered(doc) end
call('SET', doc_key(uuid), doc, 'NX', 'EX', $LONG)
