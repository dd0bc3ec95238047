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

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from machinery_py.limits.base import (
    Admission,
    Entrant,
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
HANDOVER = SECOND // 50  # from the end of a run to the begin of the next
LONGEST_WAIT = 30 * SECOND  # for a slot; two seconds for each place in line
PLACE_WAIT = 2 * SECOND
LONG_AGO = -(10**15)  # before every moment of a store, and its burst
KEPT = 60 * SECOND  # a record that holds nobody back, for its mean run


class RunningSlot(msgspec.Struct, array_like=True):
    """A run that is counted."""

    who: str
    token: str
    began_at: int
    ends_at: int


class LimitRecord(msgspec.Struct, array_like=True):
    """All that a store keeps for a rule under one key.

    Attributes:
        limit, interval: as last asked with.
        tat: see above.
        tail: the last moment that was told to one for whom there was no place; 0: nobody.
        mean: length of runs, moving.
        last: token of the last that was let in, for a repeat.
        running: slots, in the order in which they came.
        waiting, back_at, orders: who waits, the first first; when each was told to ask again; and
            its `Entrant.order`, 0 if it is not known.
    """

    limit: int = 0
    interval: int = 0
    tat: int = LONG_AGO
    tail: int = 0
    mean: int = 0
    last: str = ""
    running: list[RunningSlot] = []
    waiting: list[str] = []
    back_at: list[int] = []
    orders: list[int] = []


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `enter`, as it is stored. `rules`: in the order of the records."""

    scope: str
    who: str
    token: str
    rules: tuple[Rule, ...]
    ttl: int
    again: bool = False
    order: int = 0

    @classmethod
    def of(cls, one: Entrant) -> Asking:
        rules = (msgspec.structs.replace(rule, key=stored_name(rule.key)) for rule in one.rules)
        return cls(
            scope=stored_name(one.scope),
            who=stored_name(one.who),
            token=stored_name(one.token),
            rules=tuple(rules),
            ttl=micros_of(one.ttl),
            again=one.again,
            order=one.order,
        )

    def under(self, changed: Sequence[Rule]) -> Asking:
        """Return it under the rules that `change` has set."""
        if not changed:
            return self
        by_name = {rule.name: rule for rule in changed}
        if by_name.keys().isdisjoint(rule.name for rule in self.rules):
            return self
        rules = tuple(
            msgspec.structs.replace(by_name.get(rule.name, rule), key=rule.key)
            for rule in self.rules
        )
        return msgspec.structs.replace(self, rules=rules)


def micros_of(seconds: float) -> int:
    return round(seconds * 1e6)


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
        _refresh(record, rule, now, asking.ttl)
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


def _refresh(record: LimitRecord, rule: Rule, now: int, ttl: int = 0) -> None:
    """Drop what is over, and take over the rule's numbers.

    A moment that lies too far ahead is of a clock that was set back since. `ttl`: of who asks.
    """
    record.limit, record.interval = rule.limit, micros_of(rule.interval)
    if record.interval:  # it may have been longer, too
        record.tat = min(record.tat, now + EARLY + record.interval)
    record.tail = min(record.tail, now + LOOK_AGAIN)
    record.running = [one for one in record.running if one.ends_at > now]
    for one in record.running:
        one.ends_at = min(one.ends_at, now + max(ttl, LOOK_AGAIN))
    record.back_at = [min(moment, now + LOOK_AGAIN) for moment in record.back_at]
    _know_orders(record)
    if min(record.back_at, default=now) <= now - OVERDUE:
        kept = [at for at, moment in enumerate(record.back_at) if moment > now - OVERDUE]
        record.waiting = [record.waiting[at] for at in kept]
        record.back_at = [record.back_at[at] for at in kept]
        record.orders = [record.orders[at] for at in kept]


def _know_orders(record: LimitRecord) -> None:
    """Fill in orders that a program before this field has not kept."""
    if len(record.orders) != len(record.waiting):
        record.orders = [0] * len(record.waiting)


def _wait(record: LimitRecord, rule: Rule, asking: Asking, now: int) -> int:
    """Return the µs until its turn; 0: now."""
    place = _place(record, asking.who)
    ahead = _behind_whom(record, asking.order) if place is None else place
    if not record.interval:
        wait = _wait_for_slot(record, asking.who, ahead, now)
        if wait and _has_no_place(record, asking, place, now):
            wait = min(max(wait, record.tail + _apart(record) - now), LOOK_AGAIN)
        return wait
    if record.last == asking.token:
        return 0  # a repeat
    early = 0 if rule.strict else min(record.interval // 2, EARLY)
    free_at = record.tat
    if free_at <= now + early:
        if place is not None and record.back_at[place] <= now + EARLY:
            return 0
        # What those ahead may take whose turn has come is left to them, but not for ever.
        due = sum(1 for moment in record.back_at[:ahead] if moment <= now + EARLY)
        if free_at + min(due * record.interval, OVERDUE) <= now + early:
            return 0
    turn = max(free_at, now) + ahead * record.interval
    if _has_no_place(record, asking, place, now):
        turn = max(turn, record.tail + record.interval)
    return min(max(turn - now, 1), LOOK_AGAIN)


def _wait_for_slot(record: LimitRecord, who: str, ahead: int, now: int) -> int:
    if any(one.who == who for one in record.running):
        return 0  # a repeat, or a new delivery of it: the worker of the old one is dead
    free = record.limit - len(record.running)
    if ahead < free:
        return 0
    oldest = max((now - one.began_at for one in record.running), default=0)
    each = max(record.mean, SHORTEST_WAIT)
    before = ahead - max(free, 0)
    expected = max(each - oldest, 0) + before * (each + HANDOVER) // max(record.limit, 1)
    wait = max(expected, oldest // 4, SHORTEST_WAIT)
    return min(wait, PLACE_WAIT * (before + 1), LONGEST_WAIT)


def _apart(record: LimitRecord) -> int:
    """Return the µs between those without a place: they come back twice as fast as runs end.

    If all came back at once, workers would ask for nobody else. It is short, since a mean may be
    wrong, and then slots would be free for so long.
    """
    return min((record.mean + HANDOVER) // max(record.limit, 1) // 2, SHORTEST_WAIT)


def _place(record: LimitRecord, who: str) -> int | None:
    return record.waiting.index(who) if who in record.waiting else None


def _behind_whom(record: LimitRecord, order: int) -> int:
    """Return how many of those who wait are before a newcomer with this order."""
    ahead = len(record.waiting)
    while order and ahead and record.orders[ahead - 1] > order:
        ahead -= 1
    return ahead


def _drop(record: LimitRecord, who: str) -> bool:
    """Take it out of the line. False: it was not in it."""
    place = _place(record, who)
    if place is None:
        return False
    _know_orders(record)
    del record.waiting[place], record.back_at[place], record.orders[place]
    return True


def _has_no_place(record: LimitRecord, asking: Asking, place: int | None, now: int) -> bool:
    """Return whether it waits without a place: the line is full, or others wait without one."""
    if place is not None:
        return False
    return len(record.waiting) >= MOST_WAITING or (record.tail > now and not asking.again)


def _begin(record: LimitRecord, rule: Rule, asking: Asking, now: int) -> None:
    waited = _drop(record, asking.who) or asking.again
    if not record.interval:
        record.running = [one for one in record.running if one.who != asking.who]
        record.running.append(RunningSlot(asking.who, asking.token, now, now + asking.ttl))
    elif record.last != asking.token:
        lag = (max(record.limit, 1) - 1) * record.interval
        if waited:
            lag = max(lag, LATE)
        if now > record.tat + record.interval + SECOND:
            record.tail = 0  # those without a place did not come, and may never
        begins_at = now if rule.strict else max(record.tat, now - lag)
        record.tat = begins_at + record.interval
        record.last = asking.token


def _note(record: LimitRecord, rule: Rule, asking: Asking, now: int, wait: int) -> None:
    """Keep its place in line, or give it one; it has none where nothing holds it back."""
    place = _place(record, asking.who)
    if not wait:
        _drop(record, asking.who)
    elif place is not None:
        record.back_at[place] = now + wait
    elif _has_no_place(record, asking, place, now):
        record.tail = max(record.tail, now + wait)
    else:
        ahead = _behind_whom(record, asking.order)
        for behind in range(ahead, len(record.waiting)):  # their turns come later by one
            at = min(record.back_at[behind] + record.interval, now + LOOK_AGAIN)
            record.back_at[behind] = max(record.back_at[behind], at)
        record.waiting.insert(ahead, asking.who)
        record.back_at.insert(ahead, now + wait)
        record.orders.insert(ahead, asking.order)


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
    """Give back the slot, the place in line, or the last run that a rate has let in."""
    for one in record.running:
        if one.who == slot.who and one.token == slot.token:
            record.running.remove(one)
            took = max(now - one.began_at, 0)
            record.mean = (3 * record.mean + took) // 4 if record.mean else took
            if not record.waiting:
                record.tail = 0  # those without a place come too late, or never
            return
    _drop(record, slot.who)
    _uncount(record, slot.token)


def undo(record: LimitRecord, asking: Asking) -> None:
    """Take back what `enter` has counted, for a store that asks rule by rule."""
    record.running = [one for one in record.running if one.token != asking.token]
    _uncount(record, asking.token)


def _uncount(record: LimitRecord, token: str) -> None:
    if record.interval and record.last == token:
        record.tat, record.last = record.tat - record.interval, ""


# The store


def in_use_until(record: LimitRecord) -> int:
    """Return the moment from which the record holds nobody back."""
    moments = [record.tat + max(record.limit, 1) * record.interval, record.tail]
    moments += [one.ends_at for one in record.running]
    moments += [moment + OVERDUE for moment in record.back_at]
    return max(moments)


def kept_until(record: LimitRecord, now: int) -> int:
    """Return the moment until which a record that is stored now is kept."""
    return max(in_use_until(record), now) + KEPT


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
    used = ((key, record) for key, record in records.items() if in_use_until(record) > now)
    newest = itertools.islice(used, MOST_REPORTED)
    usages = sorted((usage(key, record, now) for key, record in newest), key=_by_name)
    return ScopeReport(scope=scope, changed=tuple(changed), usage=tuple(usages))


def _by_name(one: UsageReport) -> tuple[str, str]:
    return one.name, one.key
