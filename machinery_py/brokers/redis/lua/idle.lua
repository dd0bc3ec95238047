-- Clients that have found nothing to claim, and how one of them is told of more. waking.lua says what
-- `v`, `w` and `life` are.
--
-- note_idle, forget_idle: adds a client to those that are woken, takes it out.
-- pass_on: who has claimed all that it may does not look again soon, so another one is told of what
-- waits, or is due before it looks by itself.
--! include brokers/redis/lua/waking.lua

local function note_idle(q, client, is_away, was_away)
  if client == '' then return end
  local v, w = q[2] .. 'v', q[2] .. 'w'
  local number, life = string.match(client, '^(%d+)%.(%w+)$')
  if try('SET', q[2] .. 'life', life, 'EX', '$IDLE_LIFE', 'GET') ~= life then call('DEL', v, w) end
  try('SADD', v, number)
  try('EXPIRE', v, '$IDLE_LIFE')
  if is_away then
    try('SADD', w, number)
    try('EXPIRE', w, '$IDLE_LIFE')
  elseif was_away then
    try('SREM', w, number)  -- the order may have been another
  end
end
local function forget_idle(q, client, was_away)
  client = string.match(client, '^%d+')
  if not client then return end
  try('SREM', q[2] .. 'v', client)
  if was_away then try('SREM', q[2] .. 'w', client) end  -- the order may have been another
end
local function pass_on(queues, is_full, due, to_wake)
  if not is_full then return end
  local soon = due >= 0 and due < $SOON
  for _, q in ipairs(queues) do
    if soon or call('EXISTS', q[1], q[2] .. 'l') > 0 then wake(q, 'v', 1, to_wake) end
  end
end
