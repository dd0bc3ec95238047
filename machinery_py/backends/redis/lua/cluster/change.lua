-- In: now, seconds, C of one change (its own states, no groups, arrivals or outbox), S, record or
-- "", whether results are held, µs of the note of the record. Out: s, a, f or l (the note is too
-- old: nothing was done); finished UUIDs, others, state and queue of the finished.
--! include backends/redis/lua/changes.lua
--! include backends/redis/lua/cluster/may_fire.lua
--! include backends/redis/lua/cluster/written.lua

local text, expire, record, held, noted
text, expire, C, S, record, held, noted = unpack(unpacked)
local now, key, fires = now_of(text), C[1 + $KEY], C[1 + $FIRES]
if record ~= '' and now > noted + $NOTED then return {'l'} end
look_at({1})
local verdict, plan = decide(1)
if verdict ~= 's' then return {verdict} end
if record ~= '' then call('SET', 'mpy:o:{' .. key .. '}', record) end
if fires ~= '' then
  local g, h = group_keys(fires)
  call('HSET', g, 'fired', 1)
  local doc = call('GET', doc_key(fires))
  if doc then call('SET', doc_key(fires), triggered(doc), 'KEEPTTL') end
  call('EXPIRE', g, expire)
  call('EXPIRE', h, expire)
end
-- The listings, from which a replay would take it, are elsewhere.
for _, row in ipairs(plan) do write(row, false, held) end
return {verdict, written()}
