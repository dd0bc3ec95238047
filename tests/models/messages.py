"""How a message comes to its queue, leaves it and comes back.

A queue is (name, prefix of our keys for it); a message (place of its queue, priority, due in µs or
0, label, parks, body).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tests.models.redis import Redis, Zset

Queue = tuple[str, str]
Message = tuple[int, int, int, str, int, str]

DELAYED = "delayed_tasks"
SOON = 1_100_000  # µs; who sleeps longer is to be told of what is due before
IDLE_LIFE = 60  # seconds
NOTE_EVERY = 250_000  # µs
NOTES = 4096
SECOND = 1_000_000


@dataclass(frozen=True)
class Entry:
    """A message that is in flight or parked. `number`: of the claim, or of the parking."""

    number: int
    level: int
    fence: int
    strikes: int
    parks: int
    label: str
    body: str

    def text(self) -> str:
        counts = (self.number, self.level, self.fence, self.strikes, self.parks, len(self.label))
        return " ".join(map(str, counts)) + "\n" + self.label + self.body


def entry_of(text: str) -> Entry:
    counts, _, rest = text.partition("\n")
    number, level, fence, strikes, parks, size = map(int, counts.split())
    return Entry(number, level, fence, strikes, parks, rest[:size], rest[size:])


def list_of(queue: Queue, level: int) -> str:
    return f"{queue[1]}p:{level}" if level > 0 else queue[0]


def digest(body: str) -> str:
    return hashlib.sha1(body.encode("latin-1")).hexdigest()


def wake(redis: Redis, queue: Queue, blocked: str, count: int = 1) -> None:
    """Wake as many who sleep as there are messages for them."""
    life = redis.get(queue[1] + "life")
    for client in redis.take_any(queue[1] + blocked, count):
        redis.remove(queue[1] + ("w" if blocked == "v" else "v"), client)
        redis.woken.append(f"{client}.{life}" if life else client)


def note_idle(redis: Redis, queue: Queue, client: str, *, away: bool) -> None:
    number, _, life = client.partition(".")
    v, w = queue[1] + "v", queue[1] + "w"
    if redis.get(queue[1] + "life") != life:
        redis.delete(v, w)
    redis.keep(queue[1] + "life", life, seconds=IDLE_LIFE)
    for key in (v, w)[: 1 + away]:
        redis.add(key, number)
        redis.expire(key, IDLE_LIFE)


def give(
    redis: Redis, queue: Queue, level: int, body: str, now: int, *, first: bool = False
) -> None:
    """Put a message where it waits: last, or `first` if it comes back."""
    name, prefix = queue
    was_empty = not redis.items(list_of(queue, level))
    (redis.push_first if first else redis.push)(list_of(queue, level), body)
    if level > 0:
        redis.add("mpy:queues", name)
        redis.score(prefix + "l", str(level), level)
        wake(redis, queue, "v")
        return
    wake(redis, queue, "w")
    if not first:
        place = redis.count(prefix + "c") - 1
        if place == 0:
            redis.add("mpy:queues", name)
        if was_empty:
            redis.delete(prefix + "o")
        notes = redis.items(prefix + "o")
        if not notes or now - int(notes[-1].split()[1]) >= NOTE_EVERY:
            redis.push(prefix + "o", f"{place} {now}")
            if len(notes) == NOTES:
                redis.take(prefix + "o", 1)
    elif was_empty and not redis.exists(prefix + "o"):
        redis.push(prefix + "o", f"{int(redis.get(prefix + 'c') or 0) - 1} {now}")


def remember(redis: Redis, queue: Queue, entry: Entry) -> None:
    """Beside a waiting message, what its bytes do not say."""
    if entry.fence or entry.strikes or entry.parks or entry.label:
        note = f"{entry.fence} {entry.strikes} {entry.parks}\n{entry.label}"
        redis.write(queue[1] + "a", {digest(entry.body): note})


def check(redis: Redis, queues: Sequence[Queue], messages: Sequence[Message], now: int) -> None:
    for place, level, due, *_ in messages:
        redis.expect(list_of(queues[place], level), list)
        if due > now:
            redis.expect(DELAYED, Zset)


def put(redis: Redis, queues: Sequence[Queue], messages: Sequence[Message], now: int) -> None:
    for place, level, due, label, parks, body in messages:
        queue, entry = queues[place], Entry(0, level, 0, 0, parks, label, body)
        if due <= now:
            give(redis, queue, level, body, now)
            remember(redis, queue, entry)
            continue
        redis.add("mpy:queues", queue[0])
        if label or parks:
            park(redis, queue, due, entry, now)
        else:  # where Go looks for it
            redis.score(DELAYED, body, float(f"{due}000"))
            if due < now + SOON:
                wake(redis, queue, "v")


def park(redis: Redis, queue: Queue, due: int, entry: Entry, now: int) -> None:
    number = redis.count(queue[1] + "n")
    redis.score(queue[1] + "z", replace(entry, number=number).text(), due)
    if due < now + SOON:
        wake(redis, queue, "v")


def has_waiting(redis: Redis, queue: Queue) -> bool:
    return redis.exists(queue[0]) or redis.exists(queue[1] + "l")


def unpark(redis: Redis, queue: Queue, now: int, room: int | None = None) -> None:
    """Bring what is due to its queue, if that can take it: so many, or 100 to its tail."""
    if is_spoilt(redis, queue):
        return
    waited = []
    for text, due in redis.scores(queue[1] + "z").in_order()[: room or 100]:
        if due <= now:
            redis.unscore(queue[1] + "z", text)
            entry = entry_of(text)
            if room is not None and entry.fence and not entry.parks:
                waited.append(entry)
                continue
            give(redis, queue, entry.level, entry.body, now)
            remember(redis, queue, entry)
    for entry in reversed(waited):
        give(redis, queue, entry.level, entry.body, now, first=True)
        remember(redis, queue, entry)


def is_spoilt(redis: Redis, queue: Queue) -> bool:
    """Whether somebody keeps something else under the queue's name."""
    return type(redis.keys.get(queue[0], [])) is not list


def can_end(redis: Redis, queue: Queue, session: str, receipt: str, fate: str) -> bool:
    """Whether the delivery can come back or wait; not with a foreign value in its lists."""
    level = entry_of(redis.fields(flight_of(queue, session))[receipt]).level
    return fate in ("done", "dead") or not (
        is_spoilt(redis, queue) or is_spoilt(redis, (list_of(queue, level), ""))
    )


def due_in(redis: Redis, queues: Sequence[Queue], now: int) -> int:
    """µs until something is due, -1 if nothing is; a foreign value under Go's key never is."""
    late = redis.keys.get(DELAYED)
    left = [score / 1000 - now for score in late.values()] if isinstance(late, Zset) else []
    for queue in queues:
        stuck = is_spoilt(redis, queue)
        left += [
            score - now
            for score in redis.scores(queue[1] + "z").values()
            if score > now or not stuck
        ]
    return max(0, math.floor(min(left))) if left else -1


def give_back(
    redis: Redis,
    queue: Queue,
    entries: Sequence[tuple[str, Entry]],
    now: int,
    *,
    guilty: Collection[str] = (),
) -> None:
    """Put (receipt, message) at their lists' heads, oldest first; guilty receipts get a strike."""
    for receipt, entry in sorted(entries, key=lambda one: int(one[0]), reverse=True):
        give(redis, queue, entry.level, entry.body, now, first=True)
        remember(redis, queue, replace(entry, strikes=entry.strikes + (receipt in guilty)))


def return_arrivals(redis: Redis, queue: Queue, session: str, now: int) -> None:
    arrivals = f"{queue[1]}i:{session}"
    bodies = redis.take(arrivals, len(redis.items(arrivals)))
    for body in reversed(bodies):
        give(redis, queue, 0, body, now, first=True)


def flight_of(queue: Queue, session: str) -> str:
    return f"{queue[1]}f:{session}"


def empty(redis: Redis, queue: Queue, session: str, began: Collection[str] | None, now: int) -> int:
    """Take from a session all that it holds of a queue, and return how many had arrived.

    None: it began what it has noted.
    """
    redis.expect(queue[0], list)
    return_arrivals(redis, queue, session, now)
    held = redis.fields(flight_of(queue, session))
    redis.delete(flight_of(queue, session))
    noted = f"{queue[1]}r:{session}"
    guilty = set(redis.members(noted) if began is None else began)
    give_back(
        redis,
        queue,
        [(receipt, entry_of(text)) for receipt, text in held.items()],
        now,
        guilty=guilty,
    )
    redis.delete(noted)
    return len(held)


def bury(redis: Redis, queue: Queue, entry: Entry, head: str, now: int) -> None:
    """Keep it as a dead letter."""
    id = str(redis.count(queue[1] + "n"))
    letter = (
        f"{entry.strikes} {now} {len(head)} {len(entry.label)}\n{head}{entry.label}{entry.body}"
    )
    redis.write(queue[1] + "d", {id: letter})
    redis.score(queue[1] + "e", id, now)


def end(
    redis: Redis,
    queue: Queue,
    session: str,
    receipt: str,
    fate: str,
    left: int,
    head: str,
    now: int,
) -> Entry:
    """A delivery is over. What goes back is given back by the caller, together with others."""
    text = redis.erase(flight_of(queue, session), receipt)
    assert text is not None
    entry = entry_of(text)
    if fate == "dead":
        bury(redis, queue, entry, head, now)
    elif fate in ("later", "wait"):
        if fate == "later":
            entry = replace(entry, parks=entry.parks + 1)
        if left > 0 or fate == "wait":
            park(redis, queue, now + left, entry, now)
        else:
            give(redis, queue, entry.level, entry.body, now)
            remember(redis, queue, entry)
    return entry
