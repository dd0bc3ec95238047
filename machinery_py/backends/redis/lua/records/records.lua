-- In: now, version known to the caller, key of the records, of their version. Out: now, version, and
-- names and bodies in turn, unless the version is known.
--! include connections/redis/lua/prelude.lua

local text, known, records, count = unpack(unpacked)
local version, now = call('GET', count) or '0', int(now_of(text))
if version == known then return {now, version} end
return {now, version, call('HGETALL', records)}
