"""What all scripts for Redis share: their type, their first lines, and how their arguments are packed.

A script gets one argument, a msgpack array, and few keys: so the costs of a batch do not grow with the number of its values.
Byte strings come back as msgpack `bin`; Redis' own packer would call them text.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import msgspec

pack = msgspec.msgpack.Encoder().encode


def raw(data: bytes) -> msgspec.Raw:
    """Bytes for `pack`: Redis' unpacker knows msgpack's `str` with any bytes in it, and no `bin`."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


def filled(text: str, **values: object) -> str:
    """Lua with `$NAME` replaced by its value.

    Each call runs the whole script anew, and every local that a function uses is searched for when the function is made: a
    number that stands in the text costs nothing.
    """
    return re.sub(r"\$([A-Z]+)", lambda match: str(values[match[1]]), text)


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name under which Redis keeps it."""

    text: str
    body: bytes = field(init=False, repr=False)
    sha: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        body = self.text.encode()
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "sha", hashlib.sha1(body).hexdigest().encode())


# now(text): microseconds by the server's clock, or the text's if it is not empty (a clock of a test).
# Lua hashes every string that it makes: bodies are joined once.
# bin(s), arr(t): msgpack of a byte string, of an array of packed items. int(n): a number without an exponent; redis.call
# writes numbers as doubles, which takes longer than most commands.
# key_type(key, kind): raises before anything is written if the key holds something else; whether it is there.
# counter(key): the same for a number that is counted up.
# try(command, key, …): for what a message can do without (who sleeps, when it came, how many there were): where somebody keeps
# something else under that key of ours, the rest is still done.
# words(problem): what pcall says was raised, as a text.
# rows(key, command, items): one command with many arguments, in steps that Lua can unpack.
PRELUDE = r"""
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
  if value and not string.find(value, '^%-?%d+$') then
    error('WRONGTYPE ' .. key .. ' holds a text, not a number')
  end
end
local function rows(command, key, items)
  for i = 1, #items, 2000 do
    call(command, key, unpack(items, i, math.min(i + 1999, #items)))
  end
end
"""
