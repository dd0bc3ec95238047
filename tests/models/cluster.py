"""What the scripts of a Redis Cluster do.

Those of backends/redis/cluster_scripts.py, brokers/redis/scripts.py and locks/redis.py, each in one slot. A script of a
shard takes what the names of its keys begin with, as `prefix`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from machinery_py.backends.redis.cluster_scripts import NOTED_FOR
from tests.models.broker import used
from tests.models.messages import DELAYED, SECOND, Message, Queue, check, put
from tests.models.redis import Bag, Hash, Redis
from tests.models.states import (
    LONG,
    RATES_LIFE,
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
    own_text,
    triggered,
    write,
)

MOVE_LIFE = 1800  # seconds
FENCE_LIFE = 86_400  # seconds
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
    """A group with a document is fired by whoever has flagged it; but of one with a failed member Go tells nobody."""
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
        write(redis, batch, new, row, for_a_chord=held)
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
    for key in (document(uuid), companion(uuid)):
        if redis.seconds_left(key) > seconds:
            redis.expire(key, seconds)


def sent(redis: Redis, key: str, outbox: str) -> None:
    if (redis.get(key) or "").startswith(outbox):
        redis.delete(key)


# Schedules


def amend(
    redis: Redis,
    prefix: str,
    now: str,
    name: str,
    expected: str,
    body: str,
    key: str,
    record: str,
    noted: int,
) -> str:
    schedules = prefix + "all"
    if record and int(now) > noted + NOTED_FOR:
        return "l"
    if redis.fields(schedules).get(name, "") != expected:
        return "f"
    if record:
        redis.keep(key, record)
    if body:
        redis.write(schedules, {name: body})
    else:
        redis.erase(schedules, name)
    redis.count(prefix + "n")
    return "s"


def schedules(redis: Redis, prefix: str, now: str, known: str) -> object:
    version = redis.get(prefix + "n") or "0"
    if version == known:
        return [now, version]
    return [now, version, Bag([name, body] for name, body in redis.fields(prefix + "all").items())]


# Claims: the length of the key of a record in four bytes, that key, and what the claim holds


def claim(redis: Redis, key: str) -> object:
    kept = redis.get(key)
    if kept is None:
        return [None, None]
    record, holds = parts_of_claim(kept)
    return [holds, redis.get(record) if record else None]


def amend_claim(
    redis: Redis,
    now: str,
    claimed: str,
    expected: str,
    body: str,
    life: int,
    key: str,
    record: str,
    noted: int,
) -> str:
    """A claim with which nothing is sent names the record of the one before."""
    if record and int(now) > noted + NOTED_FOR:
        return "l"
    named, holds = parts_of_claim(redis.get(claimed) or claim_text("", ""))
    if holds != expected:
        return "f"
    if record:
        redis.keep(key, record)
        named = key
    if body:
        redis.keep(claimed, claim_text(named, body), seconds=life)
    else:
        redis.delete(claimed)
    return "s"


def release(redis: Redis, key: str, body: str) -> None:
    """Whoever holds another claim by now keeps it."""
    kept = redis.get(key)
    if kept is not None and parts_of_claim(kept)[1] == body:
        redis.delete(key)


def parts_of_claim(kept: str) -> tuple[str, str]:
    """The key of a record, or "", and what the claim holds."""
    end = 4 + int.from_bytes(kept[:4].encode("latin-1"), "big")
    return kept[4:end], kept[end:]


def claim_text(record: str, holds: str) -> str:
    return len(record).to_bytes(4, "big").decode("latin-1") + record + holds


# Listings


def note(redis: Redis, prefix: str, now: str, keys: Sequence[str]) -> object:
    """A later note of the same key is told from an earlier one."""
    stamps: list[str] = []
    for key in keys:
        stamp = max(int(now), int(redis.scores(prefix + "outbox").get(key, 0)) + 1)
        redis.score(prefix + "outbox", key, stamp)
        stamps.append(str(stamp))
    return stamps


def drop(redis: Redis, prefix: str, notes: Sequence[tuple[str, str]]) -> None:
    for key, stamp in notes:
        if redis.scores(prefix + "outbox").get(key) == float(stamp):
            redis.unscore(prefix + "outbox", key)


def records(redis: Redis, prefix: str, now: str, limit: int, age: int) -> object:
    old = [
        (key, at) for key, at in redis.scores(prefix + "outbox").in_order() if at <= int(now) - age
    ]
    return [now, [word for key, at in old[:limit] for word in (key, str(int(at)))]]


def list_states(
    redis: Redis,
    prefix: str,
    now: str,
    done: Sequence[str],
    names: Sequence[str],
    open: Sequence[str],
    replayed: bool,
) -> None:
    moment = int(now)
    for uuid, name in zip(done, names, strict=True):
        redis.unscore(prefix + "open", uuid)
        if uuid not in redis.scores(prefix + "done"):
            rates = f"{prefix}rate:{moment // SECOND}"
            redis.write(rates, {name: str(int(redis.fields(rates).get(name, "0")) + 1)})
            redis.expire(rates, RATES_LIFE)
        redis.score(prefix + "done", uuid, moment)
    for uuid in open:
        if replayed:
            redis.unscore(prefix + "done", uuid)
        if uuid not in redis.scores(prefix + "done"):
            redis.score(prefix + "open", uuid, moment)


def rates(redis: Redis, prefix: str, now: str, since: int) -> object:
    last = int(now) // SECOND
    return Bag(
        [name, int(count)]
        for second in range(max(since, last - RATES_LIFE), last + 1)
        for name, count in redis.fields(f"{prefix}rate:{second}").items()
    )


def expire(redis: Redis, prefix: str, now: str, seconds: int, others: int) -> None:
    redis.unscore_up_to(prefix + "done", int(now) - seconds * SECOND)
    redis.unscore_up_to(prefix + "open", int(now) - others * SECOND)


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


def acquire(redis: Redis, now: str, name: str, token: str, ms: int) -> int | None:
    """The fence is the time, but for that it always grows."""
    key, last = f"mpy:lock:{{{name}}}", f"mpy:fence:{{{name}}}"
    held = redis.get(key)
    if held is not None:
        owner, fence = held.split()
        return int(fence) if owner == token else None
    number = max(int(now), int(redis.get(last) or 0) + 1)
    redis.keep(last, str(number), seconds=ms / 1000 + FENCE_LIFE)
    redis.keep(key, f"{token} {number}", seconds=ms / 1000)
    return number
