-- In: now, seconds, C of one change (its own states, no groups, arrivals or outbox), S, record or
-- "", whether results are held, µs of the note of the record. Out: s, a, f or l (the note is too
-- old: nothing was done); finished UUIDs, others, state and queue of the finished.
--! include backends/redis/lua/changes.lua

-- Go's mutex is in a slot of its own: who wants to fire a group has flagged its document first
-- (flag.lua), and looked at the mutex then.
may_fire = function(uuid)
  key_type((group_keys(uuid)), 'hash')
  local doc = group_doc(uuid)
  if (not doc and call('EXISTS', (group_keys(uuid))) == 0) or has_fired(uuid) then return false end
  if not doc or call('HGET', (group_keys(uuid)), 'failed') then return true end
  return string.find(doc, '$FLAG', 1, true) or not string.find(doc, '"ChordTriggered":', 1, true)
end
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
for _, row in ipairs(plan) do write(row, false, held, expire) end
local names = {}
for name in pairs(rates) do names[#names + 1] = name end
return {verdict, {done, open, names}}
