-- In: UUIDs of tasks, of groups. Out: nothing.
--! include backends/redis/lua/changes.lua

look(unpacked[1])
for _, uuid in ipairs(unpacked[2]) do group_doc(uuid) end
for _, name in ipairs({'open', 'done', 'ready', 'partial', 'groups'}) do key_type('mpy:' .. name, 'zset') end
for _, uuid in ipairs(unpacked[1]) do
  call('DEL', doc_key(uuid), companion(uuid))
  call('ZREM', 'mpy:open', uuid)
  call('ZREM', 'mpy:done', uuid)
end
for _, uuid in ipairs(unpacked[2]) do
  call('DEL', doc_key(uuid), group_keys(uuid))
  call('ZREM', 'mpy:ready', uuid)
  call('ZREM', 'mpy:partial', uuid)
  call('ZREM', 'mpy:groups', uuid)
end
