"""What each script of backends/redis/records.py, and AMEND of stores/redis.py does."""

from __future__ import annotations

from collections.abc import Sequence

from tests.models.messages import Message, Queue, check, put
from tests.models.redis import Bag, Hash, Redis
from tests.models.states import Batch, changes_of, check_documents, commit, decide, finish

RECORDS = "mpy:records"
VERSION = "mpy:records:n"


def claim_key(name: str) -> str:
    return f"mpy:u:{name}"


def records(redis: Redis, now: str, known: str) -> object:
    version = redis.get(VERSION) or "0"
    if version == known:
        return [now, version]
    return [now, version, Bag([name, body] for name, body in redis.fields(RECORDS).items())]


def amend(
    redis: Redis,
    now: str,
    expire: int,
    name: str,
    expected: str,
    body: str,
    life: int,
    flat: Sequence[object],
    states: Sequence[object],
) -> int:
    amended = amend_and_send(redis, now, expire, name, expected, body, life, flat, states, [], [])
    return 0 if amended is None else 1


def amend_and_send(
    redis: Redis,
    now: str,
    expire: int,
    name: str,
    expected: str,
    body: str,
    life: int,
    flat: Sequence[object],
    states: Sequence[object],
    queues: Sequence[Queue],
    messages: Sequence[Message],
) -> object:
    if held(redis, name, life) != expected:
        return None
    batch, changes = Batch(), list(changes_of(flat, states).values())
    check(redis, queues, messages, int(now))
    check_documents(redis, changes)
    decided = [decide(redis, batch, change) for change in changes]
    if life:
        keep_claim(redis, name, body, life)
    else:
        keep_record(redis, name, body)
    for change, (verdict, plan) in zip(changes, decided, strict=True):
        if verdict == "s":
            commit(redis, batch, change, plan, int(now), expire)
    finish(redis, batch, int(now))
    put(redis, queues, messages, int(now))
    return redis.woken


def held(redis: Redis, name: str, life: int) -> str:
    """What the claim or the record holds; "" if there is none."""
    if life:
        return redis.get(claim_key(name)) or ""
    redis.expect(RECORDS, Hash)
    return redis.fields(RECORDS).get(name, "")


def keep_claim(redis: Redis, name: str, body: str, life: int) -> None:
    if body:
        redis.keep(claim_key(name), body, seconds=life)
    else:
        redis.delete(claim_key(name))


def keep_record(redis: Redis, name: str, body: str) -> None:
    if body:
        redis.write(RECORDS, {name: body})
    else:
        redis.erase(RECORDS, name)
    redis.count(VERSION)


def release(redis: Redis, claims: Sequence[tuple[str, str]]) -> None:
    """Whoever holds another claim by now keeps it."""
    for name, _ in claims:
        redis.expect(claim_key(name), str)
    for name, body in claims:
        if redis.get(claim_key(name)) == body:
            redis.delete(claim_key(name))
