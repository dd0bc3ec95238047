-- State documents as bytes: what stands in them is cut out where Go's field names are.
--
-- word_and_time: state and creation time. is_of: whether it is the document of this task or group.
-- may_follow: whether a state may follow another one.
-- is_made: whether a UUID is one as Go makes them, task_1a2b3c4d-…: no queue has such a name.
-- list_open, list_end: note that a task has changed, or ended. Those that wait for it are told `news`:
-- document and companion, or nothing. note_listings writes the listings and rates of all that were
-- noted.
--! include backends/redis/lua/keys.lua

local done, open, rates = {}, {}, {}
local function cut(doc, before, after)
  local _, from = string.find(doc, before, 1, true)
  local to = from and string.find(doc, after, from + 1, true)
  return to and string.sub(doc, from + 1, to - 1)
end
local function word_and_time(doc)
  -- Searching plain texts takes a tenth of the time of a pattern. The last such field counts: results may hold others.
  local _, word = string.find(doc, '"State":"', 1, true)
  local _, last = string.find(doc, '"CreatedAt":"', -90, true)
  if not word or not last then return string.match(doc, '"State":"(%u+)".*"CreatedAt":"([^"]*)"') end
  repeat
    local _, at = string.find(doc, '"CreatedAt":"', last, true)
    last = at or last
  until not at
  return string.match(doc, '^%u+', word + 1), string.match(doc, '^[^"]*', last + 1)
end
local function is_of(uuid, doc, head, after)
  local at = #head + 1
  if string.find(doc, uuid, at, true) == at and string.byte(doc, at + #uuid) == 34 and string.find(doc, head, 1, true) == 1 then
    return true
  end
  -- JSON may write the same in another way.
  local stop = string.sub(doc, 1, #head) == head and string.find(doc, after, at, true)
  local fine, read = pcall(cjson.decode, '[' .. string.sub(doc, at - 1, (stop or 0) - 1) .. ']')
  return fine and read[1] == uuid
end
local function is_task(uuid, doc) return is_of(uuid, doc, '{"TaskUUID":"', ',"TaskName":') end
local function is_final(word) return word == 'SUCCESS' or word == 'FAILURE' end
local function may_follow(word, run, new_word, new_run)
  if new_run < run then return false end
  return string.find(new_run == run and $SAME or $LATER, ' ' .. word .. '>' .. new_word .. ' ', 1, true)
end
local function is_made(uuid)
  local size = #uuid  -- a pattern takes longer
  return (size == 41 or size == 42) and string.byte(uuid, size - 36) == 95 and string.byte(uuid, size - 27) == 45
end
local function list_open(uuid) open[#open + 1] = uuid end
local function list_end(uuid, m, word, queue, news)
  done[#done + 1] = uuid
  local name = word .. queue
  rates[name] = (rates[name] or 0) + 1
  call('PUBLISH', m, news)
end
local function note_listings(now)
  local rows_done, rows_open, over = {}, {}, {}
  local stamp = int(now)
  for i, uuid in ipairs(done) do
    rows_done[2 * i - 1], rows_done[2 * i] = stamp, uuid
    if #open > 0 then over[uuid] = true end
  end
  for _, uuid in ipairs(open) do
    if not over[uuid] then
      rows_open[#rows_open + 1] = stamp
      rows_open[#rows_open + 1] = uuid
    end
  end
  pcall(rows, 'ZREM', 'mpy:open', done)
  pcall(rows, 'ZADD', 'mpy:done', rows_done)
  pcall(rows, 'ZADD', 'mpy:open', rows_open)
  if next(rates) then
    local key = 'mpy:rate:' .. int(math.floor(now / 1000000))
    local new = false
    for name, count in pairs(rates) do new = try('HINCRBY', key, name, count) == count or new end
    if new then call('EXPIRE', key, '$RATES') end
  end
  done, open, rates = {}, {}, {}
end
