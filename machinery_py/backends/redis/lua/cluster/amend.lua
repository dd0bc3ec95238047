-- In: now, name, expected, body, key of the record, record or "", µs of its note. Out: s; f if the
-- schedule holds something else ("" is none), l if the note is too old: nothing was done.
--! include connections/redis/lua/prelude.lua

local prefix = string.sub(KEYS[1], 1, -2)
local text, name, expected, body, key, record, noted = unpack(unpacked)
local all = prefix .. 'all'
if record ~= '' and now_of(text) > noted + $NOTED then return 'l' end
if (call('HGET', all, name) or '') ~= expected then return 'f' end
counter(prefix .. 'n')
if record ~= '' then call('SET', key, record) end
if body == '' then call('HDEL', all, name) else call('HSET', all, name, body) end
call('INCR', prefix .. 'n')
return 's'
