-- How a change of states and groups is decided, and how it is written.
--
-- State documents are cut where Go's field names stand, never decoded. What a script takes stands
-- in two flat arrays, C and S (a table for each would cost more than all else), and is known by its
-- place in them:
--
--     change in C   key, mark, epoch, force, fires or "", place of its first state, of the end of its last, groups or false,
--                   arrivals or false, outbox or ""
--     state in S    UUID, word, run, document before its creation time, that time, and after it, true if it has a name, last
--                   lines of the companion, true if queue, worker and start are in them, true if progress is, queue, seconds kept
--     group         (UUID, document)
--     arrival       (group, member, total, ok, callback)
--
-- R, if there is one, has the riders of some changes, by the place of the change, as riders.lua says.
--
-- A companion is lines: run, epoch, mark, started, progress, queue, worker, and then our fields.
-- look: reads what is stored of tasks, in one command for all; `known` keeps it, and what is
-- decided after that. Raises if something else lies under a UUID, or it is the name of a queue:
-- nothing of others is ever written over.
-- decide: what a change would write, and its verdict (s, a, f, c); writes nothing, and the next change
-- sees it in `known`.
-- decide_first: decides the change at place 1, if there is one.
-- leave_to_go: of a change that may not fire its group: if Go has settled the group, it is ready no
-- more, and expires.
-- listable: raises, before anything is written, if a set from which these changes are to be found
-- again is something else.
-- loosen: members of a settled chord expire when their own time is over, or after that of all. Of a
-- large one, maintenance does that in steps.
-- commit: writes it. note_states: writes the listings and the groups, once for all that a script
-- has committed.
--! include backends/redis/lua/groups.lua
--! include backends/redis/lua/riders.lua

local C, S, R
local known, firing = {}, {}
local NONE = {}
local function life_key(uuid) return 'mpy:l:{' .. uuid .. '}' end
local function is_group(uuid, doc) return is_of(uuid, doc, '{"GroupUUID":"', ',"TaskUUIDs":') end
local function group_doc(uuid)
  local key = doc_key(uuid)
  key_type(key, 'string')
  local doc = call('GET', key)
  if doc and not is_group(uuid, doc) then error('WRONGTYPE ' .. key .. ' holds a text, not group ' .. uuid) end
  return doc
end
local function is_queue(uuid)
  if #uuid < 3 or is_made(uuid) then return false end
  if string.sub(uuid, 1, 4) == 'mpy:' or uuid == 'delayed_tasks' or uuid == 'TriggerChordMutex' then return true end
  local p = 'mpy:{' .. uuid .. '}:'
  return call('EXISTS', p .. 'n', p .. 'c', p .. 's') > 0
end
local function row_of(key, m, doc, kept)
  local word, created
  if doc then word, created = word_and_time(doc) end
  local run, epoch, mark, progress = string.match(kept or '', '^(%d+)\n(%d+)\n([^\n]*)\n[^\n]*\n([^\n]?)')
  -- A companion that is nonsense counts as none, and is overwritten.
  if not run or string.sub(kept, 1, 7) == '0\n0\n\n\n\n' then
    return {key = key, m = m, run = 0, mark = '', epoch = '0', there = doc or kept, doc = doc, word = word, created = created,
            kept = run and kept}
  end
  return {key = key, m = m, run = run == '0' and 0 or tonumber(run), mark = mark, epoch = epoch, there = true, doc = doc,
          word = word, created = created, kept = kept, sticky = progress ~= ''}
end
local function look(uuids)
  for start = 1, #uuids, 1000 do
    local keys, new, missing, wrong = {}, {}, {}, nil
    for i = start, math.min(start + 999, #uuids) do
      local uuid = uuids[i]
      if not known[uuid] then
        local key = doc_key(uuid)
        if checked[key] == 'list' then key_type(key, 'string') end
        checked[key], known[uuid] = 'string', NONE
        new[#new + 1], keys[#keys + 1], keys[#keys + 2] = uuid, key, companion(uuid)
      end
    end
    local found = #keys > 0 and call('MGET', unpack(keys))
    for i, uuid in ipairs(new) do
      local key = keys[2 * i - 1]
      local doc = found[2 * i - 1]
      if not doc then
        missing[#missing + 1] = key
        if is_queue(uuid) then wrong = uuid .. ' is a queue, not a task' end
      elseif not is_task(uuid, doc) then
        wrong = key .. ' holds a text, not task ' .. uuid
      end
      known[uuid] = row_of(key, keys[2 * i], doc, found[2 * i])
    end
    -- MGET says of a key of another type that it is missing.
    if #missing > 0 and call('EXISTS', unpack(missing)) > 0 then
      for _, key in ipairs(missing) do
        local found = call('TYPE', key).ok
        if found ~= 'none' then wrong = key .. ' holds a ' .. found .. ', not a string' end
      end
    end
    if wrong then
      for i, uuid in ipairs(new) do known[uuid], checked[keys[2 * i - 1]] = nil, nil end
      error('WRONGTYPE ' .. wrong)
    end
  end
end
local function look_at(changes)
  local uuids = {}
  for _, c in ipairs(changes) do
    for s = C[c + $FIRST], C[c + $LAST], $STATE do uuids[#uuids + 1] = S[s] end
  end
  look(uuids)
end
local function read(uuid)
  if not known[uuid] then look({uuid}) end
  return known[uuid]
end
local function follows(row, s)
  if not row.word then return true end
  return may_follow(row.word, row.run, S[s + $WORD], S[s + $RUN])
end
local function named(head, doc)
  local name = cut(doc, '"TaskName":', ',"State":"')
  local from, to = string.find(head, '"TaskName":""', 1, true)
  if not name or not from then return head end
  return string.sub(head, 1, from - 1) .. '"TaskName":' .. name .. string.sub(head, to + 1)
end
local function inherited(s, row)
  local lines = S[s + $LINES]
  local started, progress, queue, worker, at = string.match(lines, '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n()')
  local own = {string.match(row.kept, $OURS)}
  if row.run == S[s + $RUN] then
    if started == '' then started = own[1] end
    if progress == '' then progress = own[2] end
  end
  if queue == '' then queue = own[3] end
  if worker == '' then worker = own[4] end
  return table.concat({started, progress, queue, worker, string.sub(lines, at)}, '\n'), progress ~= ''
end
local function merged(s, row, mark, force)
  local head, created, rest, sticky, run = S[s + $HEAD], S[s + $CREATED], S[s + $LINES], S[s + $STICKY], S[s + $RUN]
  if row.doc and not force then
    if row.created and row.created ~= '0001-01-01T00:00:00Z' then created = row.created end
    if not S[s + $NAMED] then head = named(head, row.doc) end
  end
  if row.kept and not force and (row.sticky or not S[s + $WHOLE]) then rest, sticky = inherited(s, row) end
  local kept = (run == 0 and '0' or int(run)) .. '\n' .. row.epoch .. '\n' .. mark .. '\n' .. rest
  return {state = s, key = row.key, m = row.m, run = run, mark = mark, epoch = row.epoch, there = true,
          doc = head .. created .. S[s + $TAIL], word = S[s + $WORD], created = created, kept = kept, sticky = sticky}
end
local function may_fire(uuid)
  key_type((group_keys(uuid)), 'hash')
  local doc = group_doc(uuid)
  if not doc and call('EXISTS', (group_keys(uuid))) == 0 then return false end
  if has_fired(uuid) then return false end
  -- Go sets its flag for a group with a failed member, too, and then tells nobody.
  if call('HGET', (group_keys(uuid)), 'failed') then return true end
  if doc and string.find(doc, '"ChordTriggered":true', 1, true) then return false end
  return call('EXISTS', 'TriggerChordMutex') == 0
end
local function leave_to_go(c, expire)
  local uuid = C[c + $FIRES]
  if uuid == '' or call('EXISTS', 'TriggerChordMutex') == 1 or may_fire(uuid) then return end
  local g, h = group_keys(uuid)
  key_type(h, 'set')
  call('ZREM', 'mpy:ready', uuid)
  call('EXPIRE', g, int(expire))
  call('EXPIRE', h, int(expire))
end
local function decide(c)
  local key, mark, epoch, force, fires = C[c + $KEY], C[c + $MARK], C[c + $EPOCH], C[c + $FORCE], C[c + $FIRES]
  local plan, new = {}, {}
  if epoch ~= 0 then
    local own = read(key)
    if own.there and tonumber(own.epoch) ~= epoch then
      return (mark ~= '' and own.mark == mark) and 'a' or 'f'
    end
  end
  for s = C[c + $FIRST], C[c + $LAST], $STATE do
    local uuid = S[s]
    local row = new[uuid] or read(uuid)
    local decides = uuid == key and not new[uuid]
    local legal = force or follows(row, s)
    if decides and mark ~= '' and row.mark == mark and (not legal or (row.word == S[s + $WORD] and row.run == S[s + $RUN])) then
      return 'a'
    end
    if legal then
      local own = merged(s, row, decides and mark ~= '' and mark or row.mark, force)
      new[uuid] = own
      plan[#plan + 1] = own
    elseif decides then
      return 'f'
    end
  end
  local riders = R and R[c] or NONE
  if not may_ride(riders) then return 'c' end
  if fires ~= '' then
    if firing[fires] or not may_fire(fires) then return 'f' end
    key_type(select(2, group_keys(fires)), 'set')
    firing[fires] = true
  end
  for _, one in ipairs(C[c + $GROUPS] or NONE) do
    if not group_doc(one[1]) and is_queue(one[1]) then error('WRONGTYPE ' .. one[1] .. ' is a queue, not a group') end
  end
  for _, a in ipairs(C[c + $ARRIVALS] or NONE) do
    local g, h = group_keys(a[$GROUP])
    -- Only the first arrival of a group is noted there.
    if not key_type(g, 'hash') then key_type('mpy:partial', 'zset') end
    key_type(h, 'set')
  end
  for uuid, row in pairs(new) do known[uuid] = row end
  for _, r in ipairs(riders) do ridden[rider_key(r)] = r[3] end
  return 's', plan
end
local function listable(changes)
  for _, c in ipairs(changes) do
    if C[c + $ARRIVALS] or C[c + $FIRES] ~= '' then key_type('mpy:ready', 'zset') end
    if C[c + $GROUPS] then key_type('mpy:groups', 'zset') end
    if C[c + $OUTBOX] ~= '' then key_type('mpy:outbox', 'zset') end
  end
end
local function decide_first()
  if not C[1] then return nil end
  listable({1})
  look_at({1})
  return decide(1)
end
local function write(row, force, held, expire)
  local s = row.state
  local uuid, word, kept = S[s], row.word, S[s + $KEPT]
  local final = is_final(word)
  if force then
    try('ZREM', 'mpy:done', uuid)
    for i = #done, 1, -1 do
      if done[i] == uuid then table.remove(done, i) end
    end
  end
  if final and held then
    if tonumber(kept) ~= expire then call('SET', life_key(uuid), kept, 'EX', $LONG) end
    if tonumber(kept) < $LONG then kept = '$LONG' end
  end
  call('SET', row.key, row.doc, 'EX', kept)
  call('SET', row.m, row.kept, 'EX', kept)
  if final then
    local queue = S[s + $QUEUE]
    if queue == '' then queue = select(3, string.match(row.kept, $OURS)) end
    list_end(uuid, row.m, word, queue, '')
  else
    list_open(uuid)
  end
end
local function note_states(now)
  note_listings(now)
  note_groups(now)
end
local function triggered(doc)
  local from, to = string.find(doc, '"ChordTriggered":false', 1, true)
  if not from then return doc end
  return string.sub(doc, 1, from - 1) .. '"ChordTriggered":true' .. string.sub(doc, to + 1)
end
local function loosen(members, expire)
  for start = 1, #members, 1000 do
    local keys = {}
    for i = start, math.min(start + 999, #members) do keys[#keys + 1] = life_key(members[i]) end
    for i, life in ipairs(call('MGET', unpack(keys))) do
      call('EXPIRE', doc_key(members[start + i - 1]), life or expire)
      call('EXPIRE', companion(members[start + i - 1]), life or expire)
    end
  end
end
local function fire(uuid, expire)
  local g, h = group_keys(uuid)
  call('ZREM', 'mpy:ready', uuid)
  try('ZREM', 'mpy:partial', uuid)
  call('HSET', g, 'fired', 1)
  fired[uuid] = '1'
  local doc = call('GET', doc_key(uuid))
  if doc then call('SET', doc_key(uuid), triggered(doc), 'KEEPTTL') end
  expire = int(expire)
  local many = call('SCARD', h) > $MANY
  call('EXPIRE', g, many and $LONG or expire)
  call('EXPIRE', h, many and $LONG or expire)
  if many then try('SADD', 'mpy:loose', uuid) else loosen(call('SMEMBERS', h), expire) end
end
local function commit(c, plan, now, expire)
  local arrivals, groups, outbox = C[c + $ARRIVALS] or NONE, C[c + $GROUPS] or NONE, C[c + $OUTBOX]
  if C[c + $FIRES] ~= '' then fire(C[c + $FIRES], expire) end
  for _, r in ipairs(R and R[c] or NONE) do ride(r) end
  local held = false
  for _, a in ipairs(arrivals) do
    if a[$CALLBACK] ~= '' and not has_fired(a[$GROUP]) then held = true end
  end
  for _, row in ipairs(plan) do write(row, C[c + $FORCE], held, expire) end
  for _, one in ipairs(groups) do
    local doc = one[2]
    if has_fired(one[1]) then doc = triggered(doc) end
    if call('SET', doc_key(one[1]), doc, 'NX', 'EX', $LONG) then call('ZADD', 'mpy:groups', now + expire * 1000000, one[1]) end
  end
  for _, a in ipairs(arrivals) do arrive(a) end
  if outbox ~= '' then
    call('SET', 'mpy:o:{' .. C[c] .. '}', outbox)
    call('ZADD', 'mpy:outbox', now, C[c])
  end
end
