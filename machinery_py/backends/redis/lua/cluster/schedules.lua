-- In: now, version known to the caller. Out: now, version, and names and bodies in turn, unless the
-- version is known.
--! include connections/redis/lua/prelude.lua

local prefix = string.sub(KEYS[1], 1, -2)
local version, now = call('GET', prefix .. 'n') or '0', int(now_of(unpacked[1]))
if version == unpacked[2] then return {now, version} end
return {now, version, call('HGETALL', prefix .. 'all')}
