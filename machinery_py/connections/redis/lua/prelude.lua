-- What all scripts share. Lua hashes every string that it makes: bodies are joined once.
--
-- now_of(text): microseconds by the server's clock, or the text's if it is not empty (a clock of a
-- test).
-- bin(s), arr(t): msgpack of a byte string, of an array of packed items. int(n): a number without
-- an exponent; redis.call writes numbers as doubles, which takes longer than most commands.
-- key_type(key, kind): raises before anything is written if the key holds something else; whether
-- it is there.
-- counter(key): the same for a number that is counted up.
-- try(command, key, …): for what a message can do without (who sleeps, when it came, how many there
-- were): where somebody keeps something else under that key of ours, the rest is still done.
-- words(problem): what pcall says was raised, as a text.
-- rows(key, command, items): one command with many arguments, in steps that Lua can unpack.

local call = redis.call
local unpacked = cmsgpack.unpack(ARGV[1])
local function now_of(text)
  if text ~= '' then return tonumber(text) end
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end
local function int(n) return string.format('%d', n) end
local heads = {}
local function bin_head(s)
  local head = heads[#s]
  if not head then
    head = '\198' .. struct.pack('>I4', #s)
    heads[#s] = head
  end
  return head
end
local function bin(s) return s and bin_head(s) .. s or '\192' end
local function arr(t) return '\221' .. struct.pack('>I4', #t) .. table.concat(t) end
local checked, absent = {}, {}
local function key_type(key, kind)
  local found = checked[key] or call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    error('WRONGTYPE ' .. key .. ' holds a ' .. found .. ', not a ' .. kind)
  end
  if found == 'none' then absent[key] = true end
  checked[key] = kind
  return not absent[key]
end
local function try(...)
  local fine, reply = pcall(call, ...)
  return fine and reply
end
local function words(problem) return type(problem) == 'table' and problem.err or problem end
local function counter(key)
  local fine, value = pcall(call, 'GET', key)
  if not fine then key_type(key, 'string') end
  if value and (#value > 18 or not string.find(value, '^%-?%d+$')) then
    error('WRONGTYPE ' .. key .. ' holds a text, not a number')
  end
end
local function rows(command, key, items)
  for i = 1, #items, 2000 do
    call(command, key, unpack(items, i, math.min(i + 1999, #items)))
  end
end
