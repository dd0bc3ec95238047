"""What each script of backends/redis/scripts.py does."""

from __future__ import annotations

import json
from collections.abc import Sequence

from machinery_py.tasks.states import State
from tests.models.redis import Bag, Hash, Redis, Zset
from tests.models.states import (
    LEFT,
    LONG,
    RATES_LIFE,
    Batch,
    apply_all,
    changes_of,
    companion,
    document,
    free_text,
    group_keys,
    is_of,
    life_key,
    own_text,
    row_of,
)

SECOND = 1_000_000  # µs
LOOKS = 20


def apply(
    redis: Redis, now: str, expire: int, flat: Sequence[object], states: Sequence[object]
) -> str:
    return apply_all(redis, Batch(), list(changes_of(flat, states).values()), int(now), expire)


def begin(
    redis: Redis,
    now: str,
    key: str,
    deliveries: Sequence[tuple[str, int]],
) -> object:
    begun: list[object] = []
    first = redis.fences(key, len(deliveries), int(now))
    for index, (uuid, run) in enumerate(deliveries):
        row = row_of(redis, Batch(), uuid)
        retried = row.state is not None and row.run == run and row.state.state is State.RETRY
        if row.is_final() or (row.state is not None and row.run > run) or retried:
            begun.append([row.epoch, 1, redis.get(f"mpy:o:{{{uuid}}}") or ""])
            continue
        kept = redis.get(companion(uuid)) or "0\n0\n\n\n\n\n\n"
        number, _, rest = kept.split("\n", 2)
        seconds = max(LONG, redis.seconds_left(companion(uuid)))
        epoch = max(row.epoch + 1, first + index)
        redis.keep(companion(uuid), f"{number}\n{epoch}\n{rest}", seconds=seconds)
        begun.append([epoch, 0, ""])
    return begun


def states(redis: Redis, uuids: Sequence[str], bare: bool) -> object:
    """What holds something else looks missing."""

    def text(key: str) -> object:
        value = redis.keys.get(key)
        return value if isinstance(value, str) else None

    return [[text(document(uuid)), None if bare else text(companion(uuid))] for uuid in uuids]


def marks(redis: Redis, uuids: Sequence[str]) -> object:
    return [row_of(redis, Batch(), uuid).mark for uuid in uuids]


def ready(redis: Redis, limit: int) -> object:
    """What holds something else is told, and left out."""
    found: list[object] = []
    spoilt: list[str] = []
    for start in range(0, len(redis.scores("mpy:ready")) + 1, limit):
        for group, _ in redis.scores("mpy:ready").in_order()[start : start + limit]:
            key = group_keys(group)[0]
            fields = redis.keys.get(key, Hash())
            if not isinstance(fields, Hash):
                spoilt.append(key)
            elif len(found) < limit:
                found.append([group, fields.get("callback", ""), fields.get("failed", "")])
        if len(found) == limit:
            break
    return [found, spoilt]


def partial(redis: Redis, now: str, limit: int) -> object:
    found: list[object] = []
    due = [group for group, at in redis.scores("mpy:partial").in_order() if at <= int(now)][:limit]
    for group in due:
        fields = redis.keys.get(group_keys(group)[0])
        if isinstance(fields, Hash) and "callback" in fields:
            looks = int(fields.get("looks", "0")) + 1
            redis.write(group_keys(group)[0], {"looks": str(looks)})
            redis.score("mpy:partial", group, int(now) + LEFT * min(looks, 8))
            found.append([group, int(fields["total"]), fields["callback"]])
        else:
            redis.unscore("mpy:partial", group)
    return found


def unsent(redis: Redis, now: str, skip: int, limit: int, age: int) -> object:
    old = [key for key, since in redis.scores("mpy:outbox").in_order() if since <= int(now) - age]
    return [[key, redis.get(f"mpy:o:{{{key}}}") or ""] for key in old[skip : skip + limit]]


def clear(redis: Redis, sent: Sequence[tuple[str, str]]) -> None:
    """Another outbox than the one that was sent is a later one."""
    for key, outbox in sent:
        if redis.get(f"mpy:o:{{{key}}}") in (None, outbox):
            redis.delete(f"mpy:o:{{{key}}}")
            redis.unscore("mpy:outbox", key)


def stretch(
    redis: Redis, key: str, at: str, uuid: str, low: float, size: int
) -> list[tuple[str, str]]:
    rows = [
        (member, str(int(score)))
        for member, score in reversed(redis.scores(key).in_order())
        if not at or (score, member) < (int(at), uuid)
    ]
    return [row for row in rows[:size] if int(row[1]) >= low]


def find(
    redis: Redis,
    sets: Sequence[str],
    at: str,
    uuid: str,
    low: float,
    size: int,
    limit: int,
    words: Sequence[str],
    name: str,
) -> object:
    """A hundred at a time, until enough are found; of the older set what the other reaches."""
    replies: list[object] = []
    stretches = [stretch(redis, key, at, uuid, low, size) for key in sets]
    for rows in sorted(stretches, key=lambda rows: -int(rows[0][1]) if rows else 0):
        looked: list[tuple[str, str]] = []
        places: list[list[str]] = []
        found: list[list[object]] = []
        for start in range(0, len(rows), 100):
            if len(found) >= limit or int(rows[start][1]) < low:
                break
            looked += rows[start : start + 100]
            for member, score in rows[start : start + 100]:
                text = redis.keys.get(document(member))
                said = json.loads(text) if isinstance(text, str) else {}
                is_wanted = said and (not words or said["State"] in words)
                if is_wanted and name in ("", f'"{said["TaskName"]}"'):
                    ours = redis.keys.get(companion(member))
                    places.append([member, score])
                    found.append([text, ours if isinstance(ours, str) else None])
        last = None
        if looked and (len(looked) < len(rows) or len(looked) == size):
            last = list(looked[-1])
            low = max(low, int(last[1]))
        replies.append([len(looked), last, places, found])
    return replies


def rates(redis: Redis, now: str, since: int, step: int, key: str) -> object:
    last = int(now) // SECOND
    sums: dict[tuple[int, str], int] = {}
    for second in range(max(since, last - RATES_LIFE), last + 1):
        if redis.exists(f"{key}{second}"):
            for name, count in redis.fields(f"{key}{second}").items():
                begun_at = second - second % step
                sums[begun_at, name] = sums.get((begun_at, name), 0) + int(count)
    return Bag([begun_at, name, count] for (begun_at, name), count in sums.items())


def delete(redis: Redis, rows: Sequence[tuple[str, int]], listing: str) -> object:
    """A chord's member is kept for at least a week: for longer than its own life, or as said."""
    for uuid, _ in rows:
        free_text(redis, uuid)
    if listing:
        redis.expect(listing, Zset)
    gone: list[str] = []
    for uuid, life in rows:
        is_long = life >= LONG and redis.exists(life_key(uuid))
        is_held = redis.seconds_left(document(uuid)) > life or is_long
        if row_of(redis, Batch(), uuid).is_final() and not is_held:
            redis.delete(document(uuid), companion(uuid))
            redis.unscore(listing, uuid)
            gone.append(uuid)
    return gone


def revoke(redis: Redis, now: str, seconds: int, uuids: Sequence[str]) -> None:
    for uuid in uuids:
        redis.score("mpy:revoked", uuid, int(now) + seconds * SECOND)


def revoked(redis: Redis, uuids: Sequence[str]) -> object:
    return [uuid for uuid in uuids if uuid in redis.scores("mpy:revoked")]


def forget(redis: Redis, tasks: Sequence[str], groups: Sequence[str]) -> None:
    for uuid in tasks:
        free_text(redis, uuid)
    for uuid in groups:
        own_text(redis, uuid, "GroupUUID")
    redis.expect("mpy:partial", Zset)
    for uuid in tasks:
        redis.delete(document(uuid), companion(uuid))
        redis.unscore("mpy:open", uuid)
        redis.unscore("mpy:done", uuid)
    for uuid in groups:
        redis.delete(document(uuid), *group_keys(uuid))
        redis.unscore("mpy:ready", uuid)
        redis.unscore("mpy:partial", uuid)
        redis.unscore("mpy:groups", uuid)


def tend(redis: Redis, now: str, expire: int) -> list[int]:
    """Drop what is too old from the listings.

    A group stays while it is unsettled or a member has a document.
    """
    moment = int(now)
    redis.expect("mpy:partial", Zset)
    redis.unscore_up_to("mpy:revoked", moment)
    redis.unscore_up_to("mpy:done", moment - expire * SECOND)
    redis.unscore_up_to("mpy:open", moment - 2 * LONG * SECOND)
    due = [group for group, at in redis.scores("mpy:groups").in_order() if at <= moment][:LOOKS]
    for group in due:
        text = redis.keys.get(document(group))
        text = (
            text if isinstance(text, str) and is_of(text, group, "GroupUUID") else None
        )  # something else is none of ours
        if group in redis.scores("mpy:ready") or any(
            redis.exists(document(uuid)) for uuid in members_of(text)
        ):
            redis.score("mpy:groups", group, moment + expire * SECOND)
            if text is not None:
                redis.expire(document(group), LONG)
        else:
            if text is not None:
                redis.delete(document(group))
            redis.delete(*group_keys(group))
            redis.unscore("mpy:groups", group)
            redis.unscore("mpy:partial", group)
    return [len(due), redis.exists("mpy:loose")]


def members_of(text: str | None) -> list[str]:
    try:
        return json.loads(text or "")["TaskUUIDs"] or []
    except (ValueError, KeyError, TypeError):
        return []
