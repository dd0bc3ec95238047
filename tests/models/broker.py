"""What each script of brokers/redis/scripts.py does. `now` and other times are in µs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from machinery_py.brokers.redis.scripts import MOVE_PATIENCE
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.wire.decode import known_fields
from tests.models.messages import (
    DELAYED,
    SOON,
    Entry,
    Message,
    Queue,
    bury,
    can_end,
    check,
    digest,
    due_in,
    empty,
    end,
    entry_of,
    flight_of,
    give,
    give_back,
    has_waiting,
    is_spoilt,
    list_of,
    note_idle,
    put,
    return_arrivals,
    unpark,
    wake,
)
from tests.models.redis import Redis, Zset

TOKEN_LIFE = 600  # seconds

Delivery = tuple[int, int, int, int, int, int, int, str]


def used(redis: Redis, token: str, *, seconds: int = TOKEN_LIFE) -> bool:
    """Whether a submission has been carried out; remembers that it is."""
    key = f"mpy:p:{token}"
    if not token:
        return False
    if redis.exists(key):
        return True
    redis.keep(key, "1", seconds=seconds)
    return False


def full(
    redis: Redis, queues: Sequence[Queue], limits: Sequence[tuple[int, int]], token: str
) -> str:
    """Which limit is passed, and how many wait there; "" if none or for a repeat."""
    if token and redis.exists(f"mpy:p:{token}"):
        return ""
    for place, most in limits:
        queue = queues[place]
        levels = [0, *(int(level) for level, _ in redis.scores(queue[1] + "l").in_order())]
        waiting = sum(len(redis.items(list_of(queue, level))) for level in levels)
        if waiting > most:
            return f"{place} {waiting}"
    return ""


def put_messages(
    redis: Redis,
    now: str,
    token: str,
    limits: Sequence[tuple[int, int]],
    queues: Sequence[Queue],
    messages: Sequence[Message],
) -> object:
    check(redis, queues, messages, int(now))
    if text := full(redis, queues, limits, token):
        return text
    if used(redis, token):
        return 0
    put(redis, queues, messages, int(now))
    return redis.woken


def register(redis: Redis, now: str, session: str, record: str, queues: Sequence[Queue]) -> None:
    for name, prefix in queues:
        redis.add("mpy:queues", name)
        redis.keep(f"{prefix}b:{session}", record)
        redis.score(f"{prefix}s", session, int(now))


def is_registered(redis: Redis, session: str, queues: Sequence[Queue]) -> bool:
    return all(session in redis.scores(prefix + "s") for _, prefix in queues)


STALLED = ',"stalled":true}'


def beat(redis: Redis, now: str, session: str, queues: Sequence[Queue], stalled: bool) -> int:
    if not is_registered(redis, session, queues):
        return 0
    for _, prefix in queues:
        redis.score(prefix + "s", session, int(now))
        key = f"{prefix}b:{session}"
        record = redis.get(key)
        if record is not None and record.endswith(STALLED) != stalled:
            changed = record[:-1] + STALLED if stalled else record.removesuffix(STALLED) + "}"
            redis.keep(key, changed)
    return 1


def claim(
    redis: Redis,
    now: str,
    session: str,
    queues: Sequence[Queue],
    limit: int,
    claim: int,
    lost: Sequence[int],
    client: str,
    will_sleep: bool,
    noted: bool,
    timed: bool,
    fences: str,
    highest: Sequence[int],
) -> object:
    moment = int(now)
    problems = [DELAYED] if type(redis.keys.get(DELAYED, Zset())) is not Zset else []
    problems += [name for name, _ in queues if type(redis.keys.get(name, [])) is not list]
    places = [place for place, (name, _) in enumerate(queues) if name not in problems]
    queues, known = [queues[place] for place in places], [highest[place] for place in places]
    for _, prefix in queues:
        if noted:
            number = client.partition(".")[0]
            redis.remove(prefix + "v", number)
            if len(queues) > 1:
                redis.remove(prefix + "w", number)
    if not is_registered(redis, session, queues):
        for queue in queues:
            return_arrivals(redis, queue, session, moment)
        return [0, -1, 1, redis.woken, [], 0, problems, 0]

    paused = [redis.exists(prefix + "u") for _, prefix in queues]
    blocking_queue = paused.index(False) + 1 if False in paused else 0
    found: list[Delivery] = []
    for place, queue in enumerate(queues):
        found += again(redis, place, queue, session, claim, lost)
        if paused[place]:
            return_arrivals(redis, queue, session, moment)
        else:
            arrivals = f"{queue[1]}i:{session}"
            bodies = redis.take(arrivals, len(redis.items(arrivals)))
            waits = [0 for _ in bodies] if timed else []
            found += fly(redis, place, queue, session, claim, 0, bodies, waits, known[place])
            if timed and bodies:
                forget_marks(redis, queue)
    for place, queue in enumerate(queues):
        room = None if paused[place] else max(1, limit - len(found))
        if room and has_waiting(redis, queue):
            room = (room + claim % 2) // 2
        if room != 0:
            unpark(redis, queue, moment, room)
        if not paused[place]:
            most = limit - len(found)
            found += from_lists(
                redis, place, queue, session, claim, most, moment, timed, known[place]
            )
    if will_sleep and not found:
        for place, queue in enumerate(queues):
            away = not paused[place] and place + 1 != blocking_queue
            note_idle(redis, queue, client, away=away)
    rows = [(places[place], *rest) for place, *rest in found]
    blocking_queue = places[blocking_queue - 1] + 1 if blocking_queue else 0
    due = due_in(redis, queues, moment)
    for place, queue in enumerate(queues if len(found) >= limit else ()):
        if not paused[place] and (0 <= due < SOON or has_waiting(redis, queue)):
            wake(redis, queue, "v")
    return [
        1,
        due,
        len(redis.scores("mpy:revoked")),
        redis.woken,
        rows,
        blocking_queue,
        problems,
        redis.fences(fences, len(found), moment) if found else 0,
    ]


def again(
    redis: Redis, place: int, queue: Queue, session: str, claim: int, lost: Sequence[int]
) -> list[Delivery]:
    """What the lost claims of this session took, as this claim's."""
    found: list[Delivery] = []
    flight = flight_of(queue, session)
    held = [(int(receipt), entry_of(text)) for receipt, text in redis.fields(flight).items()]
    for receipt, entry in sorted(held, key=lambda one: one[0]):
        if entry.number in lost:
            redis.write(flight, {str(receipt): replace(entry, number=claim).text()})
            found.append(
                (
                    place,
                    receipt,
                    entry.fence,
                    entry.strikes,
                    entry.parks,
                    entry.level,
                    -1,
                    entry.body,
                )
            )
    return found


def fly(
    redis: Redis,
    place: int,
    queue: Queue,
    session: str,
    claim: int,
    level: int,
    bodies: Sequence[str],
    waits: Sequence[int],
    known: int,
) -> list[Delivery]:
    """Each message gets a receipt, and what was noted of it: this is one delivery more.

    A receipt that the session knows is not given again, though a crash has undone its claim.
    """
    found: list[Delivery] = []
    if bodies and int(redis.get(queue[1] + "n") or 0) < known:
        redis.keys[queue[1] + "n"] = str(known)
    for number, body in enumerate(bodies):
        receipt = redis.count(queue[1] + "n")
        note = redis.erase(queue[1] + "a", digest(body)) or "0 0 0\n"
        counts, _, label = note.partition("\n")
        fence, strikes, parks = map(int, counts.split())
        entry = Entry(claim, level, fence + 1, strikes, parks, label, body)
        redis.write(flight_of(queue, session), {str(receipt): entry.text()})
        wait = waits[number] if waits and fence == 0 else -1
        found.append((place, receipt, entry.fence, strikes, parks, level, wait, body))
    return found


def waits_of(redis: Redis, queue: Queue, taken: int, now: int) -> list[int]:
    """For each message taken from the list just now, µs since the last mark at its place."""
    first = int(redis.get(queue[1] + "c") or 0) - len(redis.items(queue[0])) - taken
    marks = [tuple(map(int, mark.split())) for mark in redis.items(queue[1] + "o")]
    waits = []
    for place in range(first, first + taken):
        before = [at for mark, at in marks if mark <= place] or [at for _, at in marks[:1]]
        waits.append(max(0, now - before[-1]) if before else -1)
    return waits


def forget_marks(redis: Redis, queue: Queue) -> None:
    """An empty list needs none."""
    if not redis.items(queue[0]):
        redis.delete(queue[1] + "o")


def from_lists(
    redis: Redis,
    place: int,
    queue: Queue,
    session: str,
    claim: int,
    limit: int,
    now: int,
    timed: bool,
    known: int,
) -> list[Delivery]:
    """The highest priority first, and what has none last."""
    found: list[Delivery] = []
    levels = [int(level) for level, _ in reversed(redis.scores(queue[1] + "l").in_order())]
    for level in [*levels, 0]:
        if len(found) < limit:
            taken = redis.take(list_of(queue, level), limit - len(found))
            is_timed = timed and level == 0 and bool(taken)
            waits = waits_of(redis, queue, len(taken), now) if is_timed else []
            found += fly(redis, place, queue, session, claim, level, taken, waits, known)
            if is_timed:
                forget_marks(redis, queue)
            if level and not redis.exists(list_of(queue, level)):
                redis.unscore(queue[1] + "l", str(level))
    return found


def dispose(
    redis: Redis,
    now: str,
    session: str,
    queues: Sequence[Queue],
    disposals: Sequence[tuple[int, str, str, int, str]],
) -> object:
    verdicts = ""
    backs: dict[int, list[tuple[str, Entry]]] = {}
    for place, receipt, fate, left, head in disposals:
        queue = queues[place]
        is_ours = receipt in redis.fields(flight_of(queue, session))
        if not is_ours or not can_end(redis, queue, session, receipt, fate):
            verdicts += "f"
            continue
        verdicts += "s"
        entry = end(redis, queue, session, receipt, fate, left, head, int(now))
        if fate == "back":
            backs.setdefault(place, []).append((receipt, entry))
    for place, entries in backs.items():
        give_back(redis, queues[place], entries, int(now))
    return [verdicts, redis.woken]


def begin(redis: Redis, session: str, prefix: str, receipt: str) -> None:
    held, noted = redis.fields(f"{prefix}f:{session}"), f"{prefix}r:{session}"
    for one in set(redis.members(noted)) - set(held):
        redis.remove(noted, one)
    if receipt in held:
        redis.add(noted, receipt)


def holds(redis: Redis, session: str, deliveries: Sequence[tuple[str, str]]) -> object:
    return [int(receipt in redis.fields(f"{prefix}f:{session}")) for prefix, receipt in deliveries]


def condemn(
    redis: Redis,
    now: str,
    session: str,
    queues: Sequence[Queue],
    seen: str,
    began: Sequence[Sequence[str]] | Literal[False],
    tombstone: int,
) -> object:
    is_there = False
    for _, prefix in queues:
        last = redis.scores(prefix + "s").get(session)
        if last is not None and seen not in ("", str(int(last))):
            return [-1, redis.woken]
        is_there = is_there or last is not None
    if not is_there:
        return [-1, redis.woken]
    held = 0
    for place, queue in enumerate(queues):
        prefix = queue[1]
        if is_spoilt(redis, queue):
            continue
        redis.unscore(prefix + "s", session)
        redis.delete(f"{prefix}b:{session}")
        wake(redis, queue, "v", 100_000)
        held += empty(redis, queue, session, began[place] if began else None, int(now))
        redis.score(prefix + "t", session, int(now) + tombstone)
    return [held, redis.woken]


def look(redis: Redis, now: str, queues: Sequence[Queue], lease: int) -> object:
    moment = int(now)
    late: list[object] = []
    everybody: list[object] = []
    for queue in queues:
        name, prefix = queue
        if is_spoilt(redis, queue) or not has_waiting(redis, queue):
            unpark(redis, queue, moment)
        for session, last in redis.scores(prefix + "s").in_order():
            everybody.append([name, session])
            if moment - last > lease:
                late.append([name, session, str(int(last))])
        if not is_spoilt(redis, queue):
            for session, _ in redis.scores(prefix + "t").in_order():
                if redis.exists(f"{prefix}i:{session}") or redis.exists(f"{prefix}f:{session}"):
                    empty(redis, queue, session, None, moment)
            arrivals = [*redis.scores(prefix + "s"), *redis.scores(prefix + "t")]
            redis.unscore_up_to(prefix + "t", moment)
            if not has_waiting(redis, queue) and not any(
                redis.exists(f"{prefix}i:{session}") for session in arrivals
            ):
                redis.delete(prefix + "a", prefix + "o")
    return [due_in(redis, queues, moment), late, everybody, redis.woken]


def due(redis: Redis, now: str, most: int, room: float) -> object:
    """Move what is due, as far as its bytes say plainly where it belongs, and there is room."""
    late = redis.scores(DELAYED).in_order()
    if late and late[0][1] / 1000 < int(now) - MOVE_PATIENCE:
        room = math.inf
    moved: list[tuple[Queue, int, str]] = []
    others: list[str] = []
    free: dict[str, float] = {}
    for body in [body for body, score in late if score <= float(now + "000")][:most]:
        queue, level = address_of(redis, body)
        name = list_of(queue, level)
        if not queue[0] or is_spoilt(redis, (name, "")):
            others.append(body)
        elif free.setdefault(name, room - len(redis.items(name))) > 0:
            free[name] -= 1
            moved.append((queue, level, body))
    for queue, level, body in moved:
        redis.unscore(DELAYED, body)
        give(redis, queue, level, body, int(now))
    return [redis.woken, len(moved), others]


def address_of(redis: Redis, body: str) -> tuple[Queue, int]:
    """The queue and the priority that a body names; no queue if only Python can read them."""
    said = known_fields(body.encode("latin-1"))
    own = body[3 : body.find('"Priority"')]
    known = redis.members("mpy:queues")
    if (
        said is None
        or not body.startswith('{"UUID"')
        or '"UUID"' in own
        or said.RoutingKey not in known
    ):
        return ("", ""), 0
    return queue_keys(said.RoutingKey), said.Priority if said.Priority < 256 else 0


def bury_due(redis: Redis, now: str, queue: Queue, body: str, head: str) -> int:
    if not redis.unscore(DELAYED, body):
        return 0
    bury(redis, queue, Entry(0, 0, 0, 0, 0, "", body), head, int(now))
    return 1


def move(redis: Redis, now: str, queues: Sequence[Queue], messages: Sequence[Message]) -> object:
    check(redis, queues, messages, int(now))
    put(redis, queues, [one for one in messages if redis.unscore(DELAYED, one[5])], int(now))
    return redis.woken


def pause(redis: Redis, queue: Queue) -> object:
    wake(redis, queue, "v", 100_000)
    redis.add("mpy:queues", queue[0])
    redis.add(queue[1] + "u", "")
    return redis.woken


def resume(redis: Redis, queue: Queue) -> object:
    redis.delete(queue[1] + "u")
    wake(redis, queue, "v", 100_000)
    return redis.woken
