"""What the scripts of the Redis backend share: how a change of states and groups is decided, and how it is written.

State documents are cut where Go's field names stand, never decoded.

    state     (UUID, word, run, document before its creation time, that time, and after it, 1 if it has a name, last lines of
               the companion, 1 if queue, worker and start are in them, 1 if progress is, queue, seconds kept)
    group     (UUID, document)
    arrival   (group, member, total, ok, callback)
    change    (key, mark, epoch, force, fires or "", states, groups, arrivals, outbox or "")

Which state may follow which is asked of `states.advance`, pair by pair, when this module is loaded.
"""

from __future__ import annotations

from itertools import product

from machinery_py.states import State, TaskState, advance

CHORD_LIFE = 7 * 86400  # seconds that a state is kept that is not finished, and a chord without an arrival
RATES_LIFE = 3700  # seconds that finished tasks are counted by their second


def steps(runs_later: int) -> str:
    """The pairs of states, as the keys of a Lua table, that `advance` lets follow each other so many runs later."""
    pairs = [
        f"['{before}>{after}']=1" for before, after in product(State, State)
        if advance(TaskState(task_uuid="", state=before), TaskState(task_uuid="", state=after, run=runs_later)) is not None
    ]
    return "{" + ", ".join(pairs) + "}"


# A companion is lines: run, epoch, mark, started, progress, queue, worker, and then our fields.
# decide: what a change would write, and its verdict (s, a, f); writes nothing, and the next change sees it in `overlay`.
# commit: writes it. note_states: writes the listings, once for all that a script has committed.
LIBRARY = rf"""
local SAME, LATER, LONG, RATES = {steps(0)}, {steps(1)}, {CHORD_LIFE}, {RATES_LIFE}
local FINAL = {{SUCCESS = 1, FAILURE = 1}}
""" + r"""
local overlay, firing, rates, done, open = {}, {}, {}, {}, {}
local function doc_key(uuid)
  if #uuid > 2 then return uuid end
  return 'mpy:k:{' .. uuid .. '}'
end
local function companion(uuid) return 'mpy:m:{' .. uuid .. '}' end
local function cut(doc, before, after)
  local _, from = string.find(doc, before, 1, true)
  local to = from and string.find(doc, after, from + 1, true)
  return to and string.sub(doc, from + 1, to - 1)
end
local LINES = '^%d*\n%d*\n[^\n]*\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n()'
local KNOWN = {}
local function read(uuid)
  local row = overlay[uuid]
  if row then return row end
  local key, m = doc_key(uuid), companion(uuid)
  if checked[key] == 'list' then key_type(key, 'string') end
  checked[key] = 'string'
  local doc, kept = call('GET', key), call('GET', m)
  local word, created
  if doc then
    word, created = string.match(doc, '"State":"(%u+)".*"CreatedAt":"([^"]*)"')
  end
  if not kept then
    return {key = key, m = m, run = 0, mark = '', epoch = '0', there = doc, doc = doc, word = word, created = created}
  end
  local run, epoch, mark, progress = string.match(kept, '^(%d+)\n(%d+)\n([^\n]*)\n[^\n]*\n([^\n]?)')
  return {key = key, m = m, run = KNOWN[run] or tonumber(run), mark = mark, epoch = epoch, there = true, doc = doc,
          word = word, created = created, kept = kept, sticky = progress ~= ''}
end
for i = 0, 9 do KNOWN[tostring(i)] = i end
local function follows(row, s)
  if not row.word then return true end
  local run = s[3]
  if run < row.run then return false end
  return (run == row.run and SAME or LATER)[row.word .. '>' .. s[2]]
end
local ZERO = '0001-01-01T00:00:00Z'
local function named(head, doc)
  local name = cut(doc, '"TaskName":', ',"State":"')
  local from, to = string.find(head, '"TaskName":""', 1, true)
  if not name or not from then return head end
  return string.sub(head, 1, from - 1) .. '"TaskName":' .. name .. string.sub(head, to + 1)
end
local function inherited(s, row)
  local started, progress, queue, worker, at = string.match(s[8], '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n()')
  local own = {string.match(row.kept, LINES)}
  if row.run == s[3] then
    if started == '' then started = own[1] end
    if progress == '' then progress = own[2] end
  end
  if queue == '' then queue = own[3] end
  if worker == '' then worker = own[4] end
  return table.concat({started, progress, queue, worker, string.sub(s[8], at)}, '\n'), progress ~= ''
end
local function merged(s, row, mark, force)
  local head, created, rest, sticky = s[4], s[5], s[8], s[10]
  if row.doc and not force then
    if row.created and row.created ~= ZERO then created = row.created end
    if not s[7] then head = named(head, row.doc) end
  end
  if row.kept and not force and (row.sticky or not s[9]) then rest, sticky = inherited(s, row) end
  local run = s[3]
  local kept = (run == 0 and '0' or int(run)) .. '\n' .. row.epoch .. '\n' .. mark .. '\n' .. rest
  return {key = row.key, m = row.m, run = run, mark = mark, epoch = row.epoch, there = true,
          doc = head .. created .. s[6], word = s[2], created = created, kept = kept, sticky = sticky}
end
local function group_keys(uuid) return 'mpy:g:{' .. uuid .. '}', 'mpy:h:{' .. uuid .. '}' end
local function may_fire(uuid)
  local g = group_keys(uuid)
  local doc = call('GET', doc_key(uuid))
  if not doc and call('EXISTS', g) == 0 then return false end
  if call('HGET', g, 'fired') then return false end
  -- Go sets its flag for a group with a failed member, too, and then tells nobody.
  if call('HGET', g, 'failed') then return true end
  if doc and string.find(doc, '"ChordTriggered":true', 1, true) then return false end
  return call('EXISTS', 'TriggerChordMutex') == 0
end
local function settled_elsewhere(uuid)
  if call('EXISTS', 'TriggerChordMutex') == 0 and not may_fire(uuid) then call('ZREM', 'mpy:ready', uuid) end
end
local function decide(c)
  local key, mark, epoch = c[1], c[2], c[3]
  local plan, new = {}, {}
  if epoch ~= 0 then
    local own = read(key)
    if own.there and tonumber(own.epoch) ~= epoch then
      return (mark ~= '' and own.mark == mark) and 'a' or 'f'
    end
  end
  for _, s in ipairs(c[6]) do
    local uuid = s[1]
    local row = new[uuid] or read(uuid)
    local decides = uuid == key and not new[uuid]
    local legal = c[4] or follows(row, s)
    if decides and mark ~= '' and row.mark == mark and (not legal or (row.word == s[2] and row.run == s[3])) then
      return 'a'
    end
    if legal then
      local own = merged(s, row, decides and mark ~= '' and mark or row.mark, c[4])
      new[uuid] = own
      plan[#plan + 1] = {s, own}
    elseif decides then
      return 'f'
    end
  end
  if c[5] ~= '' then
    if firing[c[5]] or not may_fire(c[5]) then return 'f' end
    firing[c[5]] = true
  end
  for _, a in ipairs(c[8]) do
    local g, h = group_keys(a[1])
    key_type(g, 'hash')
    key_type(h, 'set')
  end
  for uuid, row in pairs(new) do overlay[uuid] = row end
  return 's', plan
end
local function write(c, one, held)
  local s, row = one[1], one[2]
  local uuid, kept = s[1], s[12]
  local final = FINAL[s[2]]
  if final and held and kept < LONG then kept = LONG end
  call('SET', row.key, row.doc, 'EX', kept)
  call('SET', row.m, row.kept, 'EX', kept)
  if final then
    done[#done + 1] = uuid
    local queue = s[11]
    if queue == '' then queue = select(3, string.match(row.kept, LINES)) end
    local name = s[2] .. queue
    rates[name] = (rates[name] or 0) + 1
    call('PUBLISH', row.m, '')
  else
    open[#open + 1] = uuid
  end
  if c[4] then call('ZREM', 'mpy:done', uuid) end
end
local function note_states(now)
  local rows_done, rows_open, over = {}, {}, {}
  local stamp = int(now)
  for _, uuid in ipairs(done) do
    rows_done[#rows_done + 1] = stamp
    rows_done[#rows_done + 1] = uuid
    over[uuid] = true
  end
  for _, uuid in ipairs(open) do
    if not over[uuid] then
      rows_open[#rows_open + 1] = stamp
      rows_open[#rows_open + 1] = uuid
    end
  end
  rows('ZREM', 'mpy:open', done)
  rows('ZADD', 'mpy:done', rows_done)
  rows('ZADD', 'mpy:open', rows_open)
  if next(rates) then
    local key = 'mpy:rate:' .. int(math.floor(now / 1000000))
    for name, count in pairs(rates) do call('HINCRBY', key, name, count) end
    call('EXPIRE', key, RATES)
  end
  done, open, rates = {}, {}, {}
end
local function arrive(a)
  local g, h = group_keys(a[1])
  if call('SADD', h, a[2]) == 0 then return end
  call('HSET', g, 'total', a[3], 'callback', a[5])
  if not a[4] then call('HSETNX', g, 'failed', a[2]) end
  local failed, fired = call('HGET', g, 'failed'), call('HGET', g, 'fired')
  if a[5] ~= '' and not fired and (failed or (a[3] > 0 and call('SCARD', h) >= a[3])) then
    call('ZADD', 'mpy:ready', 0, a[1])
    call('PERSIST', g)
    call('PERSIST', h)
  elseif not call('ZSCORE', 'mpy:ready', a[1]) then
    call('EXPIRE', g, LONG)
    call('EXPIRE', h, LONG)
  end
end
local function triggered(doc)
  local from, to = string.find(doc, '"ChordTriggered":false', 1, true)
  if not from then return doc end
  return string.sub(doc, 1, from - 1) .. '"ChordTriggered":true' .. string.sub(doc, to + 1)
end
local function fire(uuid, expire)
  local g, h = group_keys(uuid)
  call('ZREM', 'mpy:ready', uuid)
  call('HSET', g, 'fired', 1)
  local doc = call('GET', doc_key(uuid))
  if doc then call('SET', doc_key(uuid), triggered(doc), 'KEEPTTL') end
  call('EXPIRE', g, expire)
  call('EXPIRE', h, expire)
  for _, member in ipairs(call('SMEMBERS', h)) do
    call('EXPIRE', doc_key(member), expire)
    call('EXPIRE', companion(member), expire)
  end
end
local function commit(c, plan, now, expire)
  if c[5] ~= '' then fire(c[5], expire) end
  local held = false
  for _, a in ipairs(c[8]) do
    if a[5] ~= '' and not call('HGET', (group_keys(a[1])), 'fired') then held = true end
  end
  for _, one in ipairs(plan) do write(c, one, held) end
  for _, one in ipairs(c[7]) do
    local doc = one[2]
    if call('HGET', (group_keys(one[1])), 'fired') then doc = triggered(doc) end
    if call('SET', doc_key(one[1]), doc, 'NX', 'EX', LONG) then call('ZADD', 'mpy:groups', now + expire * 1000000, one[1]) end
  end
  for _, a in ipairs(c[8]) do arrive(a) end
  if c[9] ~= '' then
    call('SET', 'mpy:o:{' .. c[1] .. '}', c[9])
    call('ZADD', 'mpy:outbox', now, c[1])
  end
end
"""
