-- In: now, key of the fences, (UUID, run) of each delivery.
-- Out: for each (epoch, 1 if its run is over, outbox or "").
--! include backends/redis/lua/changes.lua
--! include connections/redis/lua/fences.lua

local text, key, deliveries = unpack(unpacked)
local now, begun, uuids = now_of(text), {}, {}
for i, one in ipairs(deliveries) do uuids[i] = one[1] end
look(uuids)
local first = fences(key, #deliveries, now)
for i, one in ipairs(deliveries) do
  local uuid, run = one[1], one[2]
  local row = read(uuid)
  local final = row.word == 'SUCCESS' or row.word == 'FAILURE'
  if final or (row.word and (row.run > run or (row.run == run and row.word == 'RETRY'))) then
    begun[i] = {tonumber(row.epoch), 1, call('GET', 'mpy:o:{' .. uuid .. '}') or ''}
  else
    local epoch = int(math.max(row.epoch + 1, first + i - 1))
    local rest = row.kept and string.match(row.kept, '^%d+\n%d+\n([^\n]*\n.*)$') or '\n\n\n\n\n'
    call('SET', row.m, int(row.run) .. '\n' .. epoch .. '\n' .. rest, 'EX', math.max($LONG, call('TTL', row.m)))
    known[uuid] = nil
    begun[i] = {tonumber(epoch), 0, ''}
  end
end
return begun
