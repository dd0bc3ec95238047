"""What each script of stores/redis.py does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.models.broker import full, used
from tests.models.messages import (
    Entry,
    Message,
    Queue,
    can_end,
    check,
    end,
    flight_of,
    give_back,
    put,
)
from tests.models.redis import Redis, WrongType
from tests.models.states import (
    Batch,
    Change,
    Plan,
    changes_of,
    check_documents,
    commit,
    decide,
    finish,
    leave_to_go,
    row_of,
)


def submit(
    redis: Redis,
    now: str,
    expire: int,
    token: str,
    limits: Sequence[tuple[int, int]],
    queues: Sequence[Queue],
    messages: Sequence[Message],
    flat: Sequence[object],
    states: Sequence[object],
) -> object:
    batch, changes = Batch(), list(changes_of(flat, states).values())
    check(redis, queues, messages, int(now))
    if text := full(redis, queues, limits, token):
        return text
    check_documents(redis, changes)
    decided = [decide(redis, batch, change) for change in changes]
    if used(redis, token):
        return 0
    put(redis, queues, messages, int(now))
    for change, (verdict, plan) in zip(changes, decided, strict=True):
        if verdict == "s":
            commit(redis, batch, change, plan, int(now), expire)
    finish(redis, batch, int(now))
    return redis.woken


def settle(
    redis: Redis,
    now: str,
    expire: int,
    session: str,
    queues: Sequence[Queue],
    ends: Sequence[Any],
    marks: Sequence[Any],
    flat: Sequence[object],
    states: Sequence[object],
) -> object:
    batch, changes, moment = Batch(), changes_of(flat, states), int(now)
    verdicts = ""
    carried_out: list[tuple[Any, Change | None, Plan, str]] = []
    over: set[tuple[int, str]] = set()
    check_documents(redis, [changes[number] for _, _, _, number, _ in rows_of(ends, 5) if number])
    for place, receipt, fate, number, more in rows_of(ends, 5):
        change = changes.get(number)
        is_ours = (place, receipt) not in over and receipt in redis.fields(
            flight_of(queues[place], session)
        )
        if not is_ours or not can_end(redis, queues[place], session, receipt, fate):
            verdicts += "a" if change and is_marked(redis, batch, change) else "f"
            continue
        over.add((place, receipt))
        verdict, plan = decide(redis, batch, change) if change else ("s", [])
        if more:
            check(redis, queues, more[2], moment)
        verdicts += verdict
        carried_out.append(((place, receipt, fate, more), change, plan, verdict))

    backs: dict[int, list[tuple[str, Entry]]] = {}
    for (place, receipt, fate, more), change, plan, verdict in carried_out:
        left, head, messages = more or (0, "", ())
        entry = end(redis, queues[place], session, receipt, fate, left, head, moment)
        if fate == "back":
            backs.setdefault(place, []).append((receipt, entry))
        if change and verdict == "s":
            commit(redis, batch, change, plan, moment, expire)
        if verdict == "s":
            put(redis, queues, messages, moment)
    for place, entries in backs.items():
        give_back(redis, queues[place], entries, moment)
    finish(redis, batch, moment)
    for place, receipt, number in rows_of(marks, 3):
        if receipt in redis.fields(flight_of(queues[place], session)):
            write_mark(redis, batch, changes[number], moment, expire)
    return [verdicts, redis.woken]


def is_marked(redis: Redis, batch: Batch, change: Change) -> bool:
    """Whether this very settlement has been carried out before."""
    mark = row_of(redis, batch, change.key).mark
    return mark != "" and mark == change.mark


def write_mark(redis: Redis, batch: Batch, change: Change, now: int, expire: int) -> None:
    """Dropped if it cannot be written."""
    try:
        verdict, plan = decide(redis, batch, change)
    except WrongType:
        return
    if verdict == "s":
        commit(redis, batch, change, plan, now, expire)
        finish(redis, batch, now)


def rows_of(flat: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [flat[at : at + size] for at in range(0, len(flat), size)]


def fire(
    redis: Redis,
    now: str,
    expire: int,
    queues: Sequence[Queue],
    messages: Sequence[Message],
    flat: Sequence[object],
    states: Sequence[object],
) -> object:
    batch, change = Batch(), changes_of(flat, states)[1]
    check(redis, queues, messages, int(now))
    check_documents(redis, [change])
    verdict, plan = decide(redis, batch, change)
    if verdict != "s":
        leave_to_go(redis, change, expire)
        return None
    commit(redis, batch, change, plan, int(now), expire)
    finish(redis, batch, int(now))
    put(redis, queues, messages, int(now))
    return redis.woken
