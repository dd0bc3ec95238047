-- In: session, prefix of our keys of its queue, receipt of the delivery, key of the task's checkpoints,
-- seconds, names and contents in turn. Out: as `keep` says; or f: the session does not hold the
-- delivery, and nothing was written.
--! include backends/redis/lua/checkpoints.lua

local session, p, receipt, key, life, fields = unpack(unpacked)
if call('HEXISTS', p .. 'f:' .. session, receipt) == 0 then return 'f' end
return keep(key, life, fields)
