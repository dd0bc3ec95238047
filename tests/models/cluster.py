"""What the scripts of a Redis Cluster do.

Each of backends/redis/cluster_scripts.py and brokers/redis/scripts.py works in one slot. A script
of a shard takes the prefix of its keys' names as `prefix`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from machinery_py.backends.redis.cluster_scripts import NOTED_FOR
from tests.models.broker import used
from tests.models.messages import DELAYED, Message, Queue, check, put
from tests.models.redis import Bag, Hash, Redis
from tests.models.states import (
    LONG,
    Arrived,
    Batch,
    changes_of,
    check_documents,
    companion,
    decide,
    document,
    free_text,
    group_keys,
    has_fired,
    is_of,
    life_of,
    own_text,
    triggered,
    write,
)

MOVE_LIFE = 1800  # seconds
FLAG = '"ChordTriggered": true'  # ours: Go never writes this space


# Tasks and groups


def flag(redis: Redis, uuid: str) -> int:
    text = own_text(redis, uuid, "GroupUUID")
    if text is None or has_fired(redis, uuid) or "failed" in redis.fields(group_keys(uuid)[0]):
        return 0
    if FLAG in text:
        return 1
    if '"ChordTriggered":false' in text:
        redis.keep(
            document(uuid), text.replace('"ChordTriggered":false', FLAG, 1), keep_expiry=True
        )
        return 1
    return 2 if '"ChordTriggered":true' in text else 0


def may_fire(redis: Redis, group: str) -> bool:
    """Whether the group may be fired.

    A group with a document is fired by whoever has flagged it; but Go tells nobody of one with a
    failed member.
    """
    hash_key = group_keys(group)[0]
    redis.expect(hash_key, Hash)
    text = own_text(redis, group, "GroupUUID")
    if (text is None and not redis.exists(hash_key)) or has_fired(redis, group):
        return False
    if text is None or "failed" in redis.fields(hash_key):
        return True
    return FLAG in text or '"ChordTriggered":' not in text


def change(
    redis: Redis,
    now: str,
    expire: int,
    flat: Sequence[object],
    states: Sequence[object],
    record: str,
    held: bool,
    noted: int,
) -> object:
    if record and int(now) > noted + NOTED_FOR:
        return ["l"]
    batch, one = Batch(may_fire=may_fire), changes_of(flat, states)[1]
    check_documents(redis, [one])
    verdict, plan = decide(redis, batch, one)
    if verdict != "s":
        return [verdict]
    if record:
        redis.keep(f"mpy:o:{{{one.key}}}", record)
    if one.fires:
        settle_group(redis, one.fires, expire)
    for new, row in plan:
        write(redis, batch, new, row, for_a_chord=held, expire=expire)
    finished = [new.uuid for new, row in plan if row.is_final()]
    others = [new.uuid for new, row in plan if not row.is_final()]
    return ["s", [finished, others, Bag(set(batch.finished))]]


def settle_group(redis: Redis, group: str, expire: int) -> None:
    hash_key, set_key = group_keys(group)
    redis.write(hash_key, {"fired": "1"})
    text = redis.get(document(group))
    if text is not None:
        redis.keep(document(group), triggered(text), keep_expiry=True)
    redis.expire(hash_key, expire)
    redis.expire(set_key, expire)


def keep_group(redis: Redis, uuid: str, text: str) -> None:
    is_over = has_fired(redis, uuid)
    if free_text(redis, uuid, "GroupUUID") is None:
        redis.keep(document(uuid), triggered(text) if is_over else text, seconds=LONG)


def arrive(redis: Redis, arrived: Arrived) -> int:
    group, member, total, ok, callback = arrived
    hash_key, set_key = group_keys(group)
    redis.expect(hash_key, Hash)
    if redis.add(set_key, member):
        redis.write(hash_key, {"total": str(total), "callback": callback})
        if not ok and "failed" not in redis.fields(hash_key):
            redis.write(hash_key, {"failed": member})
    if has_fired(redis, group):
        return 2
    complete = "failed" in redis.fields(hash_key) or 0 < total <= len(redis.members(set_key))
    for key in (hash_key, set_key):
        if callback and complete:
            redis.persist(key)
        else:
            redis.expire(key, LONG)
    return 1 if callback and complete else 0


def look_at(redis: Redis, group: str) -> object:
    hash_key, set_key = group_keys(group)
    fields = redis.fields(hash_key)
    members = Bag(redis.members(set_key)) if "fired" in fields else []
    return [fields.get("callback"), fields.get("failed"), fields.get("fired"), members, []]


def forget_group(redis: Redis, group: str) -> None:
    text = redis.keys.get(document(group))
    if isinstance(text, str) and is_of(text, group, "GroupUUID"):
        redis.delete(document(group))
    redis.delete(*group_keys(group))


def forget_task(redis: Redis, uuid: str) -> None:
    free_text(redis, uuid)
    redis.delete(document(uuid), companion(uuid))


def loosen(redis: Redis, uuid: str, seconds: int) -> None:
    life = life_of(redis, uuid, seconds)
    for key in (document(uuid), companion(uuid)):
        if redis.seconds_left(key) > life:
            redis.expire(key, life)


def sent(redis: Redis, key: str, outbox: str) -> None:
    if (redis.get(key) or "").startswith(outbox):
        redis.delete(key)


# Schedules


# Claims: the length of the key of a record in four bytes, that key, and what the claim holds


# Listings


# Messages


def due(redis: Redis, now: str, limit: int) -> object:
    """Scores are compared as texts, so the reply has them as Redis writes them."""
    waiting = redis.scores(DELAYED).in_order()
    found = [[body, score] for body, score in waiting if score <= float(now + "000")]
    left = max(0, math.floor(waiting[0][1] / 1000 - int(now))) if waiting else -1
    return [now, found[:limit], left]


def gone(redis: Redis, moved: Sequence[tuple[str, str]]) -> None:
    for body, score in moved:
        if redis.scores(DELAYED).get(body) == float(score):
            redis.unscore(DELAYED, body)


def take_in(
    redis: Redis, now: str, queue: Queue, moves: Sequence[tuple[str, Message]], latest: int
) -> object:
    if int(now) > latest:
        return 0
    check(redis, [queue], [message for _, message in moves], int(now))
    put(
        redis,
        [queue],
        [message for name, message in moves if not used(redis, name, seconds=MOVE_LIFE)],
        int(now),
    )
    return redis.woken


# Locks
