-- A submission in the plain case: tasks for one queue, none of them delayed, and nothing lies under
-- the keys of its token, its tasks and its groups. One EXISTS says so.
-- In: now, seconds that finished states are kept, token, queue, how many states, how many groups.
-- Then, each as an argument of its own, since to take a packed array apart would cost more than all
-- else: the items of plain.lua; UUID and document of each group; the bodies.
-- Out: clients to be woken; or nothing, if something lies there. Then nothing was written, and
-- submit.lua says what is to be done.
--! include stores/lua/plain.lua

local text, expire, token, q, states, groups = unpack(unpacked)
if q[1] == '$DELAYED' then return false end
local now, to_wake, bodies = now_of(text), {}, {}
local of_groups = 2 + 4 * states
local of_bodies = of_groups + 2 * groups
local keys = {'mpy:p:' .. token}
for at = of_groups, of_bodies - 1, 2 do
  keys[#keys + 1] = ARGV[at]
  keys[#keys + 1] = 'mpy:g:{' .. ARGV[at] .. '}'
end
if not is_new(ARGV, 2, states, 4, keys) then return false end
if groups > 0 then key_type('mpy:groups', 'zset') end
for at = of_bodies, #ARGV do bodies[#bodies + 1] = ARGV[at] end
-- The first that is written: of a full Redis, or a key of another type, submit.lua says more.
if not pcall(give, q, 0, bodies, false, now, to_wake) then return false end
call('SET', keys[1], '1', 'EX', '$TOKEN_LIFE')
write_new(ARGV, 2, states, now)
for at = of_groups, of_bodies - 1, 2 do
  call('SET', ARGV[at], ARGV[at + 1], 'EX', $LONG)
  call('ZADD', 'mpy:groups', int(now + expire * 1000000), ARGV[at])
end
return to_wake
