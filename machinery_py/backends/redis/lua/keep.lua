-- In: UUID, mark and epoch of a delivery, key of the task's checkpoints, seconds, names and contents in turn. Out: as `keep`
-- says; or f: it has ended, or another delivery has begun since, and nothing was written.
--! include backends/redis/lua/changes.lua
--! include backends/redis/lua/checkpoints.lua

local uuid, mark, epoch, key, life, fields = unpack(unpacked)
local row = read(uuid)
if tonumber(row.epoch) ~= epoch or row.mark == mark then return 'f' end
return keep(key, life, fields)
