"""The rules of limits, pure: what one record a key holds, who may run, and when the others ask.

Memory, SQLite and MongoDB call these functions; `lua/enter.lua` says the same for Redis, and
`tests/limits/test_rules.py` holds the one against the other. Moments and lengths are whole
microseconds here, so that both come to the same numbers.

Rate. `tat` is the moment from which the next run may begin (GCRA); a run adds the interval to it.
It is counted when the run begins: who waits was only told its turn, so one that never comes back
costs nothing. Runs at a time. A slot ends when it is given back, or with its lease; the wait is
what the mean run lets expect.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from machinery_py.limits.base import (
    Admission,
    Rule,
    ScopeReport,
    Slot,
    UsageReport,
    slots_of,
    stored_name,
)

SECOND = 1_000_000
MOST_WAITING = 256  # that are noted for a key; others are told a moment, and are not noted
MOST_REPORTED = 1000  # keys of a scope
OVERDUE = 10 * SECOND  # whoever should have asked so long ago loses its place
LOOK_AGAIN = 300 * SECOND  # the longest wait: so long is a changed limit not noticed
EARLY = SECOND // 100  # before its turn, at most half an interval: another trip takes longer
LATE = SECOND // 4  # after its turn, without delaying those behind it
SHORTEST_WAIT = SECOND // 20  # for a slot
LONGEST_WAIT = 30 * SECOND  # for a slot; two seconds for each place in line
PLACE_WAIT = 2 * SECOND
LONG_AGO = -(10**15)  # before every moment of a store, and its burst
KEPT = 60 * SECOND  # a record that says nothing any more, for its mean run


class RunningSlot(msgspec.Struct, array_like=True):
    """A run that is counted."""

    who: str
    token: str
    began_at: int
    ends_at: int


class WaitingPlace(msgspec.Struct, array_like=True):
    """A place in line; `back_at`: when it was told to ask again."""

    who: str
    back_at: int


class LimitRecord(msgspec.Struct, array_like=True):
    """All that a store keeps for a rule under one key.

    Attributes:
        limit, interval: as last asked with.
        tat: see above.
        tail: the last moment that was told to one for whom there was no place; 0: nobody.
        mean: length of runs, moving.
        last: token of the last that was let in, for a repeat.
        running, waiting: in the order in which they came.
    """

    limit: int = 0
    interval: int = 0
    tat: int = LONG_AGO
    tail: int = 0
    mean: int = 0
    last: str = ""
    running: list[RunningSlot] = []
    waiting: list[WaitingPlace] = []


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `enter`, as it is stored. `rules`: in the order of the records."""

    scope: str
    who: str
    token: str
    rules: tuple[Rule, ...]
    ttl: int
    again: bool = False

    @classmethod
    def of(
        cls, scope: str, who: str, token: str, rules: Sequence[Rule], ttl: float, again: bool
    ) -> Asking:
        return cls(
            scope=stored_name(scope),
            who=stored_name(who),
            token=stored_name(token),
            rules=tuple(msgspec.structs.replace(rule, key=stored_name(rule.key)) for rule in rules),
            ttl=micros_of(ttl),
            again=again,
        )

    def under(self, changed: Iterable[Rule]) -> Asking:
        """Return it under the rules that `change` has set."""
        by_name = {rule.name: rule for rule in changed}
        if by_name.keys().isdisjoint(rule.name for rule in self.rules):
            return self
        rules = tuple(
            msgspec.structs.replace(by_name.get(rule.name, rule), key=rule.key)
            for rule in self.rules
        )
        return msgspec.structs.replace(self, rules=rules)


def micros_of(seconds: float) -> int:
    return round(dt.timedelta(seconds=seconds) / dt.timedelta(microseconds=1))


def record_key(rule: Rule | Slot) -> str:
    """Return the name of the record of a rule, among those of its scope."""
    return f"{rule.name}:{rule.key}"


def stored_slot(slot: Slot) -> Slot:
    """Return the slot under the names by which it is stored."""
    return msgspec.structs.replace(
        slot,
        scope=stored_name(slot.scope),
        key=stored_name(slot.key),
        who=stored_name(slot.who),
        token=stored_name(slot.token),
    )


# Entering


def enter(records: Sequence[LimitRecord], asking: Asking, now: int) -> Admission:
    """Let it run by all rules, or note that it waits. Changes the records, one for each rule."""
    waits: list[int] = []
    for record, rule in zip(records, asking.rules, strict=True):
        _refresh(record, rule, now)
        waits.append(_wait(record, rule, asking, now))
    longest = max(waits, default=0)
    if not longest:
        for record, rule in zip(records, asking.rules, strict=True):
            _begin(record, rule, asking, now)
        running = [rule for rule in asking.rules if not rule.interval]
        return Admission(held=slots_of(asking.scope, asking.who, asking.token, running))
    for record, rule, wait in zip(records, asking.rules, waits, strict=True):
        _note(record, rule, asking, now, wait)
    held_by = asking.rules[waits.index(longest)]
    return Admission(
        wait=longest / SECOND,
        name=held_by.name,
        key=held_by.key,
        held=slots_of(asking.scope, asking.who, asking.token, asking.rules),
    )


def _refresh(record: LimitRecord, rule: Rule, now: int) -> None:
    """Drop what is over, and take over the rule's numbers."""
    record.limit, record.interval = rule.limit, micros_of(rule.interval)
    record.running = [one for one in record.running if one.ends_at > now]
    record.waiting = [one for one in record.waiting if one.back_at > now - OVERDUE]


def _wait(record: LimitRecord, rule: Rule, asking: Asking, now: int) -> int:
    """Return the µs until its turn; 0: now."""
    place = _place(record, asking.who)
    ahead = len(record.waiting) if place is None else place
    if not record.interval:
        return _wait_for_slot(record, asking.who, ahead, now)
    if record.last == asking.token:
        return 0  # a repeat
    due = sum(1 for one in record.waiting[:ahead] if one.back_at <= now)
    is_due = place is not None and record.waiting[place].back_at <= now + EARLY
    early = 0 if rule.strict else min(record.interval // 2, EARLY)
    free_at = _free_at(record, now)
    # What those ahead may take whose turn has come is left to them, but not for ever.
    left = 0 if is_due else min(due * record.interval, OVERDUE)
    if free_at + left <= now + early:
        return 0
    turn = max(free_at, now) + ahead * record.interval
    if _has_no_place(record, asking, place, now):
        turn = max(turn, record.tail + record.interval)
    return min(max(turn - now, 1), LOOK_AGAIN)


def _free_at(record: LimitRecord, now: int) -> int:
    """Return `tat`, unless a clock was set back since, or the interval was longer then."""
    return min(record.tat, now + EARLY + record.interval)


def _wait_for_slot(record: LimitRecord, who: str, ahead: int, now: int) -> int:
    if any(one.who == who for one in record.running):
        return 0  # a repeat, or a new delivery of it: the worker of the old one is dead
    free = record.limit - len(record.running)
    if ahead < free:
        return 0
    oldest = max((now - one.began_at for one in record.running), default=0)
    each = max(record.mean, SHORTEST_WAIT)
    before = ahead - max(free, 0)
    expected = max(each - oldest, 0) + before * each // max(record.limit, 1)
    wait = max(expected, oldest // 4, SHORTEST_WAIT)
    return min(wait, PLACE_WAIT * (before + 1), LONGEST_WAIT)


def _place(record: LimitRecord, who: str) -> int | None:
    return next((at for at, one in enumerate(record.waiting) if one.who == who), None)


def _has_no_place(record: LimitRecord, asking: Asking, place: int | None, now: int) -> bool:
    """Return whether it waits without a place: the line is full, or others wait without one."""
    if place is not None:
        return False
    return len(record.waiting) >= MOST_WAITING or (record.tail > now and not asking.again)


def _begin(record: LimitRecord, rule: Rule, asking: Asking, now: int) -> None:
    place = _place(record, asking.who)
    if place is not None:
        del record.waiting[place]
    if not record.interval:
        record.running = [one for one in record.running if one.who != asking.who]
        record.running.append(RunningSlot(asking.who, asking.token, now, now + asking.ttl))
    elif record.last != asking.token:
        lag = (max(record.limit, 1) - 1) * record.interval
        if place is not None or asking.again:
            lag = max(lag, LATE)
        begins_at = now if rule.strict else max(_free_at(record, now), now - lag)
        record.tat = begins_at + record.interval
        record.last = asking.token


def _note(record: LimitRecord, rule: Rule, asking: Asking, now: int, wait: int) -> None:
    """Keep its place in line, or give it one; it has none where nothing holds it back."""
    place = _place(record, asking.who)
    if not wait:
        if place is not None:
            del record.waiting[place]
    elif place is not None:
        record.waiting[place].back_at = now + wait
    elif _has_no_place(record, asking, place, now):
        record.tail = max(record.tail, now + wait)
    else:
        record.waiting.append(WaitingPlace(asking.who, now + wait))


# Slots


def renew(record: LimitRecord, slot: Slot, now: int, ttl: int) -> bool:
    """Hold the slot until `ttl` from now, if nobody has taken it; see `Limits.renew`."""
    record.running = [one for one in record.running if one.ends_at > now or one.token == slot.token]
    for one in record.running:
        if one.who == slot.who:
            if one.token == slot.token:
                one.ends_at = now + ttl
            return one.token == slot.token
    # Of a forgotten record the limit is not known; it runs, and so it counts.
    if record.limit and len(record.running) >= record.limit:
        return False
    record.running.append(RunningSlot(slot.who, slot.token, now, now + ttl))
    return True


def leave(record: LimitRecord, slot: Slot, now: int) -> None:
    """Give back the slot, or the place in line."""
    for one in record.running:
        if one.who == slot.who and one.token == slot.token:
            record.running.remove(one)
            took = max(now - one.began_at, 0)
            record.mean = (3 * record.mean + took) // 4 if record.mean else took
            return
    record.waiting = [one for one in record.waiting if one.who != slot.who]


def undo(record: LimitRecord, asking: Asking) -> None:
    """Take back what `enter` has counted, for a store that asks rule by rule."""
    record.running = [one for one in record.running if one.token != asking.token]
    if record.interval and record.last == asking.token:
        record.tat, record.last = record.tat - record.interval, ""


# The store


def kept_until(record: LimitRecord) -> int:
    """Return the moment from which the record says nothing any more."""
    moments = [record.tat + max(record.limit, 1) * record.interval, record.tail]
    moments += [one.ends_at for one in record.running]
    moments += [one.back_at + OVERDUE for one in record.waiting]
    return max(moments) + KEPT


def usage(key: str, record: LimitRecord, now: int) -> UsageReport:
    """Say what is counted in the record of this key (see `record_key`). Changes the record."""
    name, _, of = key.partition(":")
    rule = Rule(name=name, key=of, limit=record.limit, interval=record.interval / SECOND)
    _refresh(record, rule, now)
    newcomer = Asking(scope="", who="", token="?", rules=(rule,), ttl=0)
    return UsageReport(
        name=name,
        key=of,
        limit=rule.limit,
        interval=rule.interval,
        running=len(record.running),
        waiting=len(record.waiting),
        wait=_wait(record, rule, newcomer, now) / SECOND,
    )


def report(
    scope: str, changed: Sequence[Rule], records: Mapping[str, LimitRecord], now: int
) -> ScopeReport:
    """Say what is limited in a scope, from its records by `record_key`, the newest first."""
    newest = itertools.islice(records.items(), MOST_REPORTED)
    used = sorted((usage(key, record, now) for key, record in newest), key=_by_name)
    return ScopeReport(scope=scope, changed=tuple(changed), usage=tuple(used))


def _by_name(one: UsageReport) -> tuple[str, str]:
    return one.name, one.key
