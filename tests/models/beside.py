"""Run a script beside its model; compare replies, all keys, expiries and what was published."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from hypothesis import note
from redis.exceptions import ResponseError

from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.connection import RedisConnection, command
from machinery_py.connections.redis.scripts import Script, pack
from tests.models.redis import Bag, Hash, Redis, WrongType, Zset

NEAR = 30.0  # seconds between two expiries meant to be equal; different ones are 100 apart

# Out: the server's time in ms; of each key (name, type, ms until it expires, what it holds).
DUMP = b"""
local found = {}
local time = redis.call('TIME')
for i, key in ipairs(redis.call('KEYS', '*')) do
  local kind, holds = redis.call('TYPE', key).ok, nil
  if kind == 'string' then holds = {redis.call('GET', key)}
  elseif kind == 'list' then holds = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'set' then holds = redis.call('SMEMBERS', key)
  elseif kind == 'stream' then holds = {tostring(redis.call('XLEN', key))}
  elseif kind == 'zset' then holds = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  else holds = redis.call('HGETALL', key) end
  found[i] = {key, kind, redis.call('PTTL', key), holds}
end
return {time[1] * 1000, found}
"""

Reading = Callable[[Any], Any]


def text(value: Any) -> Any:
    """As the models see it: bytes are Latin-1, and there are no tuples."""
    match value:
        case bytes():
            return value.decode("latin-1")
        case str():
            return value.encode().decode("latin-1")
        case msgspec.Raw():
            return bytes(value)[5:].decode("latin-1")
        case list() | tuple():
            return [text(one) for one in value]
    return value


def unpacked(packed: msgspec.Raw | bytes) -> Any:
    """Unpack what was packed for a script, to pack it again: its texts may hold any bytes."""
    head = bytes(packed)[0]
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        return [unpacked(one) for one in msgspec.msgpack.decode(packed, type=list[msgspec.Raw])]
    if 0xA0 <= head <= 0xBF:
        return raw(bytes(packed)[1:])
    if head in (0xD9, 0xDA, 0xDB):
        return raw(bytes(packed)[{0xD9: 2, 0xDA: 3, 0xDB: 5}[head] :])
    return msgspec.msgpack.decode(packed)


def seen(key: str, value: Any) -> Any:
    """A value for comparing, and for reading in a failure."""
    if isinstance(value, set):
        return sorted(value)
    return dict(value) if isinstance(value, dict) else value


class Beside:
    """A database of the real server, and the model of it."""

    dumping = DUMP

    def __init__(self, url: str) -> None:
        self.driver = RedisDriver(url)
        self.driver.ask(b"FLUSHDB", doing="emptying")
        self.link: RedisConnection = self.driver.open()
        self.ear: RedisConnection = self.driver.open()
        self.ear.ask(b"PSUBSCRIBE", b"mpy:m:*")
        self.model = Redis()
        self.model.choose = self._chosen
        self._after: dict[str, Any] = {}
        self._woken: tuple[str, ...] = ()  # by this step, in this order

    def close(self) -> None:
        self.link.close()
        self.ear.close()
        self.driver.close()

    def ask(self, *parts: str) -> Any:
        return text(self.link.ask(*(part.encode("latin-1") for part in parts)))

    def evaluate(self, script: Script, argument: bytes) -> Any:
        return self.link.ask(b"EVAL", script.body, b"0", argument)

    # What there is

    def dump(self) -> tuple[dict[str, Any], dict[str, float]]:
        """The keys of the server, and when they expire."""
        time_ms, found = text(self.link.ask(b"EVAL", self.dumping, b"0"))
        keys: dict[str, Any] = {}
        expires: dict[str, float] = {}
        for key, kind, left, holds in found:
            pairs = zip(holds[::2], holds[1::2], strict=True) if kind in ("zset", "hash") else ()
            match kind:
                case "string" | "stream":
                    keys[key] = holds[0]
                case "list":
                    keys[key] = holds
                case "set":
                    keys[key] = set(holds)
                case "zset":
                    keys[key] = Zset({member: float(score) for member, score in pairs})
                case _:
                    keys[key] = Hash(pairs)
            if left >= 0:
                expires[key] = (time_ms + left) / 1000
        return keys, expires

    def snapshot(self) -> list[bytes]:
        """For `restore`."""
        parts: list[bytes] = []
        for key in self.link.ask(b"KEYS", b"*"):
            left = max(0, self.link.ask(b"PTTL", key))
            parts += (key, b"%d" % left, self.link.ask(b"DUMP", key))
        return parts

    def restore(self, snapshot: list[bytes]) -> None:
        """Only these keys are left, as they were."""
        packets = [command(b"FLUSHDB")]
        packets += [
            command(b"RESTORE", *snapshot[at : at + 3]) for at in range(0, len(snapshot), 3)
        ]
        self.link.send(b"".join(packets))
        for _ in packets:
            self.link.read()

    def heard(self) -> list[str]:
        """The channels on which something was published since the last call."""
        self.link.ask(b"PUBLISH", b"mpy:m:end", b"")
        channels: list[str] = []
        while True:
            message = text(self.ear.read())
            if message[0] != "pmessage":
                continue
            if message[2] == "mpy:m:end":
                return channels
            channels.append(message[2])

    # One step

    def run(
        self,
        script: Script,
        model: Callable[..., Any],
        *values: Any,
        reading: Reading = lambda reply: reply,
    ) -> Any:
        """Run both, compare, and return the reply; `reading` gives it the model's form."""
        shown = text(list(values))
        note(f"{model.__name__}{tuple(shown)!r}")
        try:
            reply = reading(text(self.evaluate(script, pack(values))))
        except ResponseError as error:
            reply = "WRONGTYPE" if "WRONGTYPE" in str(error) else str(error)
        self._after, expires = self.dump()
        published = sorted(self.heard())
        lists = (
            [part for part in reply if isinstance(part, list)] if isinstance(reply, list) else []
        )
        idle = set[str]().union(*(one for one in self.model.keys.values() if isinstance(one, set)))
        named = dict.fromkeys(
            client
            for part in [reply, *lists]
            if isinstance(part, list)
            for one in part
            if isinstance(one, str) and (client := one.partition(".")[0]) in idle
        )
        # The server chooses whom it wakes, and its reply does not say for which queue.
        *orders, last = itertools.permutations(named)
        before = self.model.saved()
        for self._woken in orders:
            try:
                self._follow(model, shown, reply, expires, published)
                return reply
            except AssertionError:
                self.model.restore(before)
                before = self.model.saved()
        self._woken = last
        self._follow(model, shown, reply, expires, published)
        return reply

    def _follow(
        self,
        model: Callable[..., Any],
        shown: list[Any],
        reply: Any,
        expires: dict[str, float],
        published: list[str],
    ) -> None:
        """Let the model take the step that the script took, and compare."""
        before = self.model.saved()
        self.model.begin()
        try:
            expected = model(self.model, *shown)
        except WrongType:
            self.model.restore(before)
            self.model.begin()
            expected = "WRONGTYPE"
        assert is_same(reply, expected), (
            f"the replies differ: the script's {reply!r}, the model's {expected!r}"
        )
        self.compare(expires)
        assert published == sorted(self.model.published), (
            "what was published differs (script, model)"
        )

    def _chosen(self, key: str, members: set[str], count: int) -> Iterable[str]:
        """The members the server took: those gone, then those named and put back."""
        left = self._after.get(key, set())
        named = self._woken
        place = {one: named.index(one) if one in named else len(named) for one in members}
        return sorted(members, key=lambda one: (one in left, place[one], one))[:count]

    def compare(self, expires: dict[str, float]) -> None:
        real, model = self._after, self.model
        for key in sorted(real.keys() | model.keys.keys()):
            ours, theirs = model.keys.get(key), real.get(key)
            assert (type(theirs), seen(key, theirs)) == (type(ours), seen(key, ours)), (
                f"{key} differs (script, model)"
            )
            at, expected = expires.get(key), model.expires.get(key)
            assert (at is None) == (expected is None), (
                f"{key} expires at {at}, in the model at {expected}"
            )
            assert at is None or expected is None or abs(at - expected) < NEAR, (
                f"{key} expires {at - expected} s late"
            )

    # What others do

    def both(self, *words: str) -> None:
        """A command of somebody else: SET, RPUSH, DEL, SADD, ZADD."""
        note(f"{words!r}")
        self.ask(*words)
        self.model.begin()
        name, key, *rest = words
        model = self.model
        match name:
            case "SET":
                model.keep(key, rest[0])
                if len(rest) == 3:
                    model.expire(key, float(rest[2]))
            case "RPUSH":
                model.push(key, *rest)
            case "SADD":
                for member in rest:
                    model.add(key, member)
            case "ZADD":
                model.score(key, rest[1], float(rest[0]))
            case "DEL":
                model.delete(key)
            case _:
                raise AssertionError(f"no model of {name}")


def is_same(reply: Any, expected: Any) -> bool:
    if isinstance(expected, Bag):
        return isinstance(reply, list) and sorted(reply) == sorted(expected)
    if isinstance(expected, list | tuple):
        return (
            isinstance(reply, list)
            and len(reply) == len(expected)
            and all(map(is_same, reply, expected))
        )
    return bool(reply == expected)
