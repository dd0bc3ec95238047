-- Settlements in the plain case: of deliveries that are held here, of tasks that have ended alone, or
-- with success as members of a chord: nothing else follows, and their states may end like this.
-- These are written; all others are left in `rest`, as they were in `ends`, to settle.lua, which is
-- the whole truth.
-- `letters` has an "s" at the places of the first, and "" at those of the others.
--
-- It takes what it needs apart by itself, since the strings that the rest makes are what costs: Redis
-- hashes every byte of a string that Lua sees.
--! include backends/redis/lua/groups.lua

local letters, rest = {}, {}
do
  local text, expire, session, queues, ends, _, C, S, R = unpack(unpacked)
  local keys, places, seen, gone, chords = {}, {}, {}, {}, {}
  -- The chord of a member, with its first arrival and all members; false if settle.lua must look.
  local function chord_of(arrivals, kept)
    local a = arrivals[1]
    -- Of a failed one it is not known here whether it is true: what it says of the group must wait.
    if #arrivals ~= 1 or not a[$OK] then return false end
    local chord = chords[a[$GROUP]]
    if chord == nil then
      local g, h = group_keys(a[$GROUP])
      chord = pcall(key_type, g, 'hash') and pcall(key_type, h, 'set') and pcall(key_type, 'mpy:ready', 'zset')
        and pcall(key_type, 'mpy:partial', 'zset') and not has_fired(a[$GROUP]) and {first = a, members = {}}
      chords[a[$GROUP]] = chord
    end
    return chord and a[$CALLBACK] ~= '' and a[$TOTAL] == chord.first[$TOTAL] and a[$CALLBACK] == chord.first[$CALLBACK]
      and tonumber(kept) == expire and chord
  end
  for at = 1, #ends, $END do
    local c, q = ends[at + $END_CHANGE], queues[ends[at + $END_QUEUE] + 1]
    local s = c > 0 and C[c + $FIRST]
    local uuid = s and S[s]
    local plain = s and ends[at + $END_FATE] == 'done' and not ends[at + $END_MORE] and not C[c + $GROUPS] and not (R and R[c])
      and C[c + $LAST] == s + $STATE - 1 and C[c] == uuid and is_final(S[s + $WORD]) and S[s + $NAMED] and S[s + $WHOLE]
      and (not C[c + $ARRIVALS] or chord_of(C[c + $ARRIVALS], S[s + $KEPT])) and not seen[uuid] and #places < 1000
    if uuid then seen[uuid] = true end
    letters[(at - 1) / $END + 1] = ''
    if plain and call('HEXISTS', q[2] .. 'f:' .. session, ends[at + $END_RECEIPT]) == 1 then
      places[#places + 1] = at
      keys[#keys + 1] = doc_key(uuid)
      keys[#keys + 1] = companion(uuid)
    end
  end
  local found = #keys > 0 and call('MGET', unpack(keys)) or {}
  for i, at in ipairs(places) do
    local c = ends[at + $END_CHANGE]
    local s, doc, kept = C[c + $FIRST], found[2 * i - 1], found[2 * i]
    local run, epoch, progress = '0', '0', ''
    if kept and string.sub(kept, 1, 7) ~= '0\n0\n\n\n\n' then
      run, epoch, progress = string.match(kept, '^(%d+)\n(%d+)\n[^\n]*\n[^\n]*\n([^\n]?)')
    end
    if doc and kept and run and progress == '' and is_task(S[s], doc) then
      local word, created = word_and_time(doc)
      if word and may_follow(word, tonumber(run), S[s + $WORD], S[s + $RUN]) then
        if created == '0001-01-01T00:00:00Z' then created = S[s + $CREATED] end
        local q, run = queues[ends[at + $END_QUEUE] + 1], S[s + $RUN]
        gone[q] = gone[q] or {}
        table.insert(gone[q], ends[at + $END_RECEIPT])
        run = run == 0 and '0' or int(run)
        found[2 * i - 1] = S[s + $HEAD] .. created .. S[s + $TAIL]
        found[2 * i] = run .. '\n' .. epoch .. '\n' .. C[c + $MARK] .. '\n' .. S[s + $LINES]
        letters[(at - 1) / $END + 1] = 's'
      end
    end
  end
  -- First what makes room: a full Redis allows it, and then lets the rest pass.
  for q, receipts in pairs(gone) do rows('HDEL', q[2] .. 'f:' .. session, receipts) end
  for i, at in ipairs(places) do
    if letters[(at - 1) / $END + 1] == 's' then
      local c = ends[at + $END_CHANGE]
      local s, arrivals = C[c + $FIRST], C[c + $ARRIVALS]
      local kept = S[s + $KEPT]
      if arrivals then
        table.insert(chords[arrivals[1][$GROUP]].members, arrivals[1][$MEMBER])
        if expire < $LONG then kept = '$LONG' end
      end
      call('SET', keys[2 * i - 1], found[2 * i - 1], 'EX', kept)
      call('SET', keys[2 * i], found[2 * i], 'EX', kept)
      local news = #found[2 * i - 1] < $NEWS and found[2 * i - 1] .. '\n' .. found[2 * i] or ''
      list_end(S[s], keys[2 * i], S[s + $WORD], S[s + $QUEUE], news)
    end
  end
  if #done > 0 then note_listings(now_of(text)) end
  for _, chord in pairs(chords) do
    if chord and #chord.members > 0 then arrive(chord.first, chord.members) end
  end
  if next(arrived) then note_groups(now_of(text)) end
  for at = 1, #ends, $END do
    if letters[(at - 1) / $END + 1] == '' then
      for i = at, at + $END - 1 do rest[#rest + 1] = ends[i] end
    end
  end
  if #rest == 0 and #unpacked[6] == 0 then return {table.concat(letters), {}} end
end
