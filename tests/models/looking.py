"""What each script of brokers/redis/inspect.py does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tests.models import messages
from tests.models.messages import DELAYED, Entry, Queue, digest, flight_of, list_of, unpark, wake
from tests.models.redis import Bag, Redis, Zset


def levels_of(redis: Redis, queue: Queue) -> list[int]:
    """Priorities in use, the highest first."""
    return [int(level) for level, _ in reversed(redis.scores(queue[1] + "l").in_order())]


def pending(redis: Redis, queue: Queue, limit: int) -> object:
    notes = redis.fields(queue[1] + "a")
    waiting: list[tuple[int, str]] = []
    for level in [*levels_of(redis, queue), 0]:
        if len(waiting) < limit:
            waiting += [(level, body) for body in redis.items(list_of(queue, level))]
    return [[level, notes.get(digest(body)), body] for level, body in waiting[:limit]]


def late(redis: Redis, queues: Sequence[Queue], limit: int) -> object:
    found = [
        ["", round(due / 1000), body] for body, due in redis.scores(DELAYED).in_order()[:limit]
    ]
    for name, prefix in queues:
        found += [
            [name, int(due), text] for text, due in redis.scores(prefix + "z").in_order()[:limit]
        ]
    return found


def stats(redis: Redis, now: str, queues: Sequence[Queue]) -> object:
    redis.expect(DELAYED, Zset)
    lines: list[object] = []
    for queue in queues:
        redis.expect(queue[0], list)
    for queue in queues:
        name, prefix = queue
        unpark(redis, queue, int(now))
        plain = len(redis.items(name))
        waiting = plain + sum(
            len(redis.items(list_of(queue, level))) for level in levels_of(redis, queue)
        )
        running = sum(
            len(redis.fields(flight_of(queue, session))) for session in redis.scores(prefix + "s")
        )
        lines.append(
            [
                waiting,
                running,
                len(redis.scores(prefix + "z")),
                len(redis.fields(prefix + "d")),
                oldest(redis, queue, plain) if plain else "",
                int(redis.exists(prefix + "u")),
            ]
        )
    return [lines, redis.woken]


def late_names(redis: Redis, start: int, size: int) -> object:
    redis.expect(DELAYED, Zset)
    bodies = [body for body, _ in redis.scores(DELAYED).in_order()][::-1][start : start + size]
    keys = (re.search(r'"RoutingKey":("[^"]*")', body) for body in bodies)
    counts = Counter(found[1] if found else "" for found in keys)
    return [len(bodies), Bag([name, count] for name, count in counts.items())]


def oldest(redis: Redis, queue: Queue, length: int) -> str:
    """When the oldest message was put: the last note before its place."""
    place = int(redis.get(queue[1] + "c") or 0) - length
    found = ""
    for note in redis.items(queue[1] + "o"):
        at, when = note.split()
        if not found or int(at) <= place:
            found = when
        else:
            break
    return found


def workers(redis: Redis, queues: Sequence[Queue]) -> object:
    return [
        [
            [
                session,
                str(int(last)),
                len(redis.fields(flight_of(queue, session))),
                redis.get(f"{queue[1]}b:{session}"),
            ]
            for session, last in redis.scores(queue[1] + "s").in_order()
        ]
        for queue in queues
    ]


def purge(redis: Redis, queue: Queue, members: Sequence[str]) -> int:
    name, prefix = queue
    gone = len(redis.items(name)) + len(redis.scores(prefix + "z"))
    for level in levels_of(redis, queue):
        gone += len(redis.items(list_of(queue, level)))
        redis.delete(list_of(queue, level))
    redis.delete(name, *(prefix + letter for letter in "lzao"))
    return gone + sum(redis.unscore(DELAYED, member) for member in members)


def pause(redis: Redis, queue: Queue) -> object:
    wake(redis, queue, "v", 100_000)
    redis.add("mpy:queues", queue[0])
    redis.add(queue[1] + "u", "")
    return redis.woken


def resume(redis: Redis, queue: Queue) -> object:
    redis.woken += redis.members(queue[1] + "u") - {""}
    redis.delete(queue[1] + "u")
    wake(redis, queue, "v", 100_000)
    return redis.woken


def dead(redis: Redis, queues: Sequence[Queue], limit: int) -> object:
    return [
        [
            [id, redis.fields(prefix + "d").get(id)]
            for id, _ in list(reversed(redis.scores(prefix + "e").in_order()))[:limit]
        ]
        for _, prefix in queues
    ]


def bury(redis: Redis, text: str, queue: Queue, head: str, label: str, body: str) -> object:
    redis.add("mpy:queues", queue[0])
    messages.bury(redis, queue, Entry(0, 0, 0, 0, 0, label, body), head, int(text))
    return None


def take_dead(redis: Redis, letters: Sequence[tuple[Queue, str]]) -> object:
    found: list[str | None] = []
    for (_, prefix), id in letters:
        letter = redis.erase(prefix + "d", id)
        if letter is not None:
            redis.unscore(prefix + "e", id)
        found.append(letter)
    return found
