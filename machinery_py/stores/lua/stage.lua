-- In: a step, as step.lua has it; of a plain one in its own argument, behind (now, token, number,
-- queue, UUIDs). Out: 0 if the token was used before, else 1. Raises what `submit` would raise; keeps
-- the step, and carries nothing out.
--! include stores/lua/step.lua
--! include stores/lua/staged.lua

local plain, text, token, number = ARGV[2], unpacked[1], unpacked[3], unpacked[4]
if plain then token, number = unpacked[2], unpacked[3] end
if call('EXISTS', 'mpy:p:' .. token) == 1 then return 0 end
if plain and unpacked[4][1] ~= '$DELAYED' and is_new(unpacked[5], 1, #unpacked[5], 1, {}) then
  can_give(unpacked[4], 0)
else
  local queues, messages = general(plain and cmsgpack.unpack(plain) or unpacked)
  check(queues, messages, now_of(text))
  if C[1] then look_at({1}) end
end
call('HSET', staged(token), number, plain or ARGV[1])
call('EXPIRE', staged(token), '$TOKEN_LIFE')
return 1
