"""Limits in Redis: one script for all rules of a run.

Keys: connections/redis/keys.py. The time is the server's.

Limits: a server that loses its last writes (no AOF, a failover) has counted a few runs less. One
that restarts empty limits anew; slots that are renewed are taken again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.keys import LIMITS, quoted
from machinery_py.connections.redis.scripts import Folder, Script, pack
from machinery_py.errors import MachineryError
from machinery_py.limits import rules as pure
from machinery_py.limits.base import (
    Admission,
    Entrant,
    Rule,
    ScopeReport,
    Slot,
    slots_of,
    stored_name,
)
from machinery_py.limits.records import AskedLimits
from machinery_py.limits.rules import (
    MOST_REPORTED,
    SECOND,
    Asking,
    LimitRecord,
    micros_of,
    record_key,
    stored_slot,
)
from machinery_py.texts import get_logger

logger = get_logger(__name__)

NOTED_FOR = 86_400.0  # seconds that a scope is known for `read` after it was last used
NOTE_EVERY = 5.0  # seconds; a store that has restarted empty knows no scope
_lua = Folder("limits/lua", {"LONG_AGO": pure.LONG_AGO, "OVERDUE": pure.OVERDUE, "KEPT": pure.KEPT})
ENTER = _lua.script(
    "enter",
    "asking a limit",
    **{
        name: getattr(pure, name)
        for name in (
            "MOST_WAITING",
            "SECOND",
            "EARLY",
            "LATE",
            "LOOK_AGAIN",
            "SHORTEST_WAIT",
            "HANDOVER",
            "LONGEST_WAIT",
            "PLACE_WAIT",
        )
    },
)
RENEW = _lua.script("slots", "renewing a slot of a limit")
LEAVE = _lua.script("slots", "giving back a slot of a limit")
READ = _lua.script("read", "reading limits")

_decode_record = msgspec.msgpack.Decoder(LimitRecord).decode
#: Name, limit, interval in µs, strict: a rule as scripts read it.
_PackedRule = tuple[str, int, int, int]
_decode_changed = msgspec.msgpack.Decoder(list[_PackedRule]).decode


class RedisLimits(AskedLimits):
    """Keys on the driver's server. The driver belongs to its creator."""

    asks_together = True

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver
        self._clock = driver.clock
        self._noted: dict[str, float] = {}  # scope → monotonic second

    def _run(self, script: Script, *values: object) -> Any:
        return self._driver.run(script, self._driver.now(), *values)

    def _ask(self, *parts: bytes, doing: str) -> Any:
        """Send a command, whose second word is a key."""
        return self._driver.ask(*parts, doing=doing)

    def _enter(self, asking: Asking) -> Admission:
        return self._enter_all([asking])[0]

    def enter_all(self, entrants: Sequence[Entrant]) -> list[Admission]:
        return self._enter_all(list(map(Asking.of, entrants))) if entrants else []

    def _enter_all(self, askings: Sequence[Asking]) -> list[Admission]:
        for scope in {one.scope for one in askings}:
            self._note(scope)  # first, so that `read` finds every slot
        replies = self._run(ENTER, list(map(_packed, askings)))
        return list(map(_admission, askings, replies))

    def renew(self, held: Sequence[Slot], *, ttl: float) -> list[bool | None]:
        slots = list(map(stored_slot, held))
        renewed = self._change_slots(RENEW, max(micros_of(ttl), 1), slots)
        for scope in {one.scope for one in slots}:
            with contextlib.suppress(MachineryError):  # the slots are held all the same
                self._note(scope)
        return renewed

    def leave(self, held: Sequence[Slot]) -> None:
        self._change_slots(LEAVE, 0, list(map(stored_slot, held)))

    def _change_slots(self, script: Script, ttl: int, slots: Sequence[Slot]) -> list[bool | None]:
        if not slots:
            return []
        return [bool(done) for done in self._run(script, ttl, _rows(slots))]

    def change(self, scope: str, rules: Sequence[Rule]) -> None:
        scope = stored_name(scope)
        key, doing = _prefix(scope), "changing a limit"
        if not rules:
            self._ask(b"DEL", key, doing=doing)
            self._ask(b"ZADD", LIMITS, self._second(), scope.encode(), doing=doing)
            return
        packed = [(one.name, one.limit, micros_of(one.interval), int(one.strict)) for one in rules]
        self._ask(b"ZADD", LIMITS, b"inf", scope.encode(), doing=doing)
        self._ask(b"SET", key, pack(packed), doing=doing)

    def _note(self, scope: str) -> None:
        """Note for `read` that the scope is used, every few seconds."""
        moment = time.monotonic()
        if moment - self._noted.get(scope, -NOTE_EVERY) < NOTE_EVERY:
            return
        if len(self._noted) > MOST_REPORTED:
            self._noted.clear()
        self._ask(b"ZADD", LIMITS, b"GT", self._second(), scope.encode(), doing=ENTER.doing)
        self._noted[scope] = moment

    def _second(self) -> bytes:
        return b"%d" % self._clock.now().timestamp()

    def changed(self) -> Mapping[str, Sequence[Rule]]:
        doing = READ.doing
        found = self._ask(b"ZRANGEBYSCORE", LIMITS, b"+inf", b"+inf", doing=doing)
        rules = {
            scope: _rules_of(self._ask(b"GET", _prefix(scope), doing=doing))
            for scope in map(bytes.decode, found)
        }
        return {scope: some for scope, some in rules.items() if some}

    def read(self) -> list[ScopeReport]:
        doing = READ.doing
        old = self._clock.now().timestamp() - NOTED_FOR
        self._ask(b"ZREMRANGEBYSCORE", LIMITS, b"-inf", b"%d" % old, doing=doing)
        scopes = sorted(
            one.decode() for one in self._ask(b"ZRANGE", LIMITS, b"0", b"-1", doing=doing)
        )
        reports = (self._report(scope) for scope in scopes)
        return [one for one in reports if one.changed or one.usage]

    def _report(self, scope: str) -> ScopeReport:
        now, changed, *found = self._run(READ, _tag(scope), pure.MOST_REPORTED)
        records = {
            key.decode(): _decode_record(record)
            for key, record in zip(found[::2], found[1::2], strict=True)
        }
        return pure.report(scope, _rules_of(changed), records, int(now))


def _packed(asking: Asking) -> tuple[object, ...]:
    rules = [
        (one.name, one.key, one.limit, micros_of(one.interval), int(one.strict))
        for one in asking.rules
    ]
    again = int(asking.again)
    return _tag(asking.scope), asking.who, asking.token, asking.ttl, again, rules, asking.order


def _admission(asking: Asking, reply: Sequence[int]) -> Admission:
    wait, *numbers = reply
    if not wait:
        running = [asking.rules[number - 1] for number in numbers]
        return Admission(held=slots_of(asking.scope, asking.who, asking.token, running))
    held_by = asking.rules[numbers[0] - 1]
    return Admission(
        wait=wait / SECOND,
        name=held_by.name,
        key=held_by.key,
        held=slots_of(asking.scope, asking.who, asking.token, asking.rules),
    )


def _rows(slots: Sequence[Slot]) -> list[tuple[str, str, str, str]]:
    return [(_tag(one.scope), record_key(one), one.who, one.token) for one in slots]


def _rules_of(changed: bytes | None) -> list[Rule]:
    """Return the rules that `change` has kept."""
    return [
        Rule(name=name, limit=limit, interval=interval / SECOND, strict=bool(strict))
        for name, limit, interval, strict in (_decode_changed(changed) if changed else ())
    ]


def _tag(scope: str) -> str:
    """Return the scope as it stands between the braces of its keys."""
    return quoted(scope)


def _prefix(scope: str) -> bytes:
    return f"mpy:limit:{{{quoted(scope)}}}".encode()
