"""Messages in a Redis Cluster: each queue is a broker of its own in the slot of its name, with the scripts of one Redis.

    <queue>, mpy:{q}:…      as on one Redis (docs/explanation/redis-protocol.md)
    mpy:{q}:delayed_tasks   what is delayed, so that it comes to its list in one step
    mpy:{q}:mpy:p:<token>   what was put there
    mpy:queues              the names of all queues, in a slot of its own; written before the first use of a queue
    delayed_tasks           Go's (`redis.delayed_tasks_key`), in a slot of its own: emptied into the queues, see `_move_theirs`

Limits: messages for several queues are put queue by queue: after an error some may be there, and others not (PublishUnknown).
Delayed messages are brought to their queues by Python workers only.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
    close_all,
)
from machinery_py.brokers.redis.broker import FIRST_QUEUE, LEASE, MOVE, OTHERS, RedisBroker
from machinery_py.brokers.redis.cluster_consumer import ClusterConsumer
from machinery_py.brokers.redis.messages import EMPTY, Packed, Queues, known, message_of, packed
from machinery_py.brokers.redis.scripts import CONSTANTS
from machinery_py.clock import moment_of
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.cluster import RedisClusterDriver, SlotDriver
from machinery_py.connections.redis.keys import QUEUES, queue_keys
from machinery_py.connections.redis.pool import with_delayed_key
from machinery_py.connections.redis.requests import command_at, script_at
from machinery_py.connections.redis.scripts import Folder, Script, pack
from machinery_py.connections.redis.slots import slot_of
from machinery_py.errors import BrokerUnavailable, NameRefused, PublishRefused, PublishUnknown
from machinery_py.names import queue_problem
from machinery_py.texts import get_logger

MOVE_WITHIN = (
    300_000_000  # µs between the look at Go's set and the move; the servers' clocks differ by less
)
MOVE_LIFE = 1800  # seconds that a name is remembered under which a message was put once
FOR_EVER = 2**53  # µs

_lua = Folder("brokers/redis/lua/cluster", CONSTANTS)
_DUE = _lua.script("due")
_GONE = _lua.script("gone")
_TAKE_IN = _lua.script("take_in", MOVE_LIFE=MOVE_LIFE)

_Move = tuple[str, Packed]

logger = get_logger(__name__)


class QueueBroker(RedisBroker):
    """One queue, in its slot."""

    def __init__(self, driver: SlotDriver, queue: str, *, lease: float) -> None:
        super().__init__(driver, lease=lease)
        self.slot = driver
        self.queue = queue
        self.is_known = False  # in the list of queues

    def move_due(self, patience: float) -> None:
        self._move_due(patience)

    def take_in(self, moves: Sequence[_Move], latest: int) -> bool:
        """Put each message whose name was not used before. False: it is too late for it, and nothing was done."""
        to_wake = self._run(
            _TAKE_IN,
            self.driver.now(),
            queue_keys(self.queue),
            moves,
            latest,
            doing="moving due messages",
        )
        if to_wake == 0:
            return False
        self.driver.unblock(to_wake)
        return True

    @property
    def has_suspects(self) -> bool:
        """Whether it wants to be tended again soon, to judge them."""
        return bool(self._judge)

    def _queues(self) -> list[tuple[str, str]]:
        return [queue_keys(self.queue)]

    def _looked_after(self) -> list[tuple[str, str]]:
        return self._queues()

    def _condemn(self, session: bytes, queues: Sequence[str], beat: str) -> None:
        # What the session holds of its other queues, their own brokers give back; they read its file, too.
        self._give_up(session.decode(), [self.queue], beat)


class ClusterBroker(Broker):
    """Queues in a cluster, which belongs to whoever made it."""

    features = BrokerFeatures(name="redis")

    def __init__(self, cluster: RedisClusterDriver, *, lease: float = LEASE) -> None:
        self.cluster = cluster
        self.lease = lease
        self._go_key = cluster.limits.delayed_key.encode()
        self._go_slot = queue_keys(cluster.limits.delayed_key)[1].encode()
        self._brokers: dict[str, QueueBroker] = {}
        self._own: dict[str, None] = {}  # queues that this process has consumers of
        self._cursor = b"0"  # where the next look at queues of others begins
        self._turn = 0
        self._consumers: weakref.WeakSet[ClusterConsumer] = weakref.WeakSet()

    def _of(self, queue: str) -> QueueBroker:
        """The broker of this queue.

        Raises:
            NameRefused: its name has braces in such places that our keys for it would be in another slot.
        """
        broker = self._brokers.get(queue)
        if broker is None:
            if not is_usable(queue):
                raise NameRefused(
                    f"queue {queue!r}: its keys would be in several slots of a Redis Cluster (expected a name "
                    "without braces, or with one {…} in it)",
                    queue,
                )
            broker = QueueBroker(
                self.cluster.at(queue_keys(queue)[1].encode()), queue, lease=self.lease
            )
            self._brokers[queue] = broker
        return broker

    def _register(self, queues: Sequence[str]) -> None:
        """Before anything else is written: a queue that nobody knows would not be looked after."""
        new = [queue for queue in dict.fromkeys(queues) if not self._of(queue).is_known]
        if new:
            self.cluster.ask(
                [command_at(b"SADD", QUEUES, *map(str.encode, new))],
                doing="naming queues",
                away=BrokerUnavailable,
            )
            for queue in new:
                self._of(queue).is_known = True

    def _all(self) -> list[QueueBroker]:
        (names,) = self.cluster.ask(
            [command_at(b"SMEMBERS", QUEUES)], doing="listing queues", away=BrokerUnavailable
        )
        return [self._of(name) for name in sorted(name.decode(errors="replace") for name in names)]

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        parts: dict[str, list[Message]] = {}
        for message in messages:
            parts.setdefault(message.queue, []).append(message)
        self._register(list(parts))
        new = False
        for done, (queue, part) in enumerate(parts.items()):
            try:
                new = self._of(queue).put(part, token=token) or new
            except (BrokerUnavailable, PublishRefused) as error:
                if done == 0:
                    raise
                unknown = PublishUnknown(
                    f"{done} of {len(parts)} queues have their messages; queue {queue!r}: {error}"
                )
                unknown.permanent = error.permanent
                raise unknown from error
        return new

    def put_once(self, messages: Sequence[tuple[str, Message]]) -> None:
        """Store each message, unless one was stored under the same name within half an hour.

        Raises:
            PublishRefused, BrokerUnavailable: some may have been stored; putting all of them again is safe.
        """
        parts: dict[str, list[_Move]] = {}
        for name, message in messages:
            queues = Queues([message.queue])
            parts.setdefault(message.queue, []).append((name, packed(message, queues)))
        self._register(list(parts))
        for queue, part in parts.items():
            self._of(queue).take_in(part, FOR_EVER)

    def consume(self, queues: Sequence[str], *, worker: str) -> ClusterConsumer:
        self._register(queues)
        brokers = [self._of(queue) for queue in dict.fromkeys(queues)]
        places = [(one.queue, one.slot, one.move_due) for one in brokers]
        self._own.update(dict.fromkeys(queues))
        consumer = ClusterConsumer(places, worker=worker, patience=self.lease / 4)
        self._consumers.add(consumer)
        return consumer

    # House-keeping

    def _looked_after(self) -> list[QueueBroker]:
        """As RedisBroker's. Each costs a round trip."""
        ((self._cursor, names),) = self.cluster.ask(
            [command_at(b"SSCAN", QUEUES, self._cursor, b"COUNT", b"%d" % OTHERS)],
            doing="listing queues",
            away=BrokerUnavailable,
        )
        others = sorted(name.decode(errors="replace") for name in names)
        doubtful = [queue for queue, broker in list(self._brokers.items()) if broker.has_suspects]
        return [self._of(queue) for queue in dict.fromkeys([*self._own, *doubtful, *others])]

    def tend(self) -> float:
        brokers = self._looked_after()
        pause = self._move_theirs()
        for _ in brokers:
            # Once round. After a failure, which takes its time, the next call begins behind that queue.
            self._turn += 1
            pause = min(pause, brokers[self._turn % len(brokers)].tend())
        return pause

    def _move_theirs(self) -> float:
        """Bring what is due in Go's set to its queues; the seconds until there is more to do.

            1  the queue   the message, if this move (its bytes and score) was not made yet
            2  Go's set    the message is removed

        A crash in between, or another mover, repeats 1, which does nothing, and then 2. A mover that slept in front of 1 for so
        long that the move could have been forgotten is too late, and does nothing.
        """
        interval = self.lease / 4
        while True:
            now, due, due_in = self._go(
                _DUE, self.cluster.now(), MOVE, doing="looking for due messages"
            )
            if not due:
                return interval if due_in < 0 else min(interval, max(due_in / 1e6, 0.01))
            parts: dict[str, list[tuple[_Move, tuple[bytes, bytes]]]] = {}
            for body, score in due:
                said = known(body)
                priority = said.Priority if said and 0 <= said.Priority <= 255 else 0
                move = (name_of_move(body, score), (0, priority, 0, EMPTY, 0, raw(body)))
                parts.setdefault(self._place(said.RoutingKey if said else ""), []).append(
                    (move, (body, score))
                )
            self._register(list(parts))
            for queue, moves in parts.items():
                if self._take_in(queue, [move for move, _ in moves], int(now) + MOVE_WITHIN):
                    self._go(
                        _GONE,
                        [(raw(body), raw(score)) for _, (body, score) in moves],
                        doing="moving due messages",
                    )

    def _take_in(self, queue: str, moves: Sequence[_Move], latest: int) -> bool:
        """As QueueBroker.take_in; what a spoilt queue cannot take comes to that of messages that name none."""
        try:
            return self._of(queue).take_in(moves, latest)
        except NameRefused as error:
            if queue == FIRST_QUEUE:
                raise
            logger.error("delayed messages of %r go to %r: %s", queue, FIRST_QUEUE, error)
            return self._of(FIRST_QUEUE).take_in(moves, latest)

    def _go(self, script: Script, *values: object, doing: str) -> Any:
        script = with_delayed_key(script, self.cluster.limits.delayed_key)
        return self.cluster.ask(
            [script_at(self._go_slot, script, pack(values))], doing=doing, away=BrokerUnavailable
        )[0]

    def _place(self, routing_key: str) -> str:
        """The queue of a message of Go's; one that says none, or one that cannot be, comes where somebody will bury it."""
        return (
            routing_key
            if not queue_problem(routing_key) and is_usable(routing_key)
            else FIRST_QUEUE
        )

    def _theirs(self) -> list[tuple[int, Message]]:
        """Return the messages in Go's set, with the moment at which each is due, in µs."""
        (rows,) = self.cluster.ask(
            [command_at(b"ZRANGE", self._go_key, b"0", b"-1", b"WITHSCORES")],
            doing="listing delayed messages",
            away=BrokerUnavailable,
        )
        found: list[tuple[int, Message]] = []
        for body, score in zip(rows[::2], rows[1::2], strict=True):
            said, due = known(body), int(float(score) / 1000 + 0.5)
            queue, priority = (said.RoutingKey, said.Priority) if said else ("", 0)
            found.append((due, message_of(body, queue=queue, priority=priority, due=due)))
        return found

    # Looking

    def pending(self, queue: str, limit: int) -> list[Message]:
        self._move_theirs()
        return self._of(queue).pending(queue, limit)

    def delayed(self, limit: int) -> list[Message]:
        found = [(moment_of(due), message) for due, message in self._theirs()]
        found += [
            (message.eta or moment_of(0), message)
            for broker in self._all()
            for message in broker.delayed(limit)
        ]
        found.sort(key=lambda one: one[0])
        return [message for _, message in found[:limit]]

    def stats(self) -> list[QueueStats]:
        self._move_theirs()
        late = [message.queue for _, message in self._theirs()]
        found: list[QueueStats] = []
        for broker in self._all():
            for one in broker.stats():
                found.append(
                    msgspec.structs.replace(one, delayed=one.delayed + late.count(one.queue))
                )
        return found

    def workers(self) -> list[WorkerInfo]:
        found: dict[str, WorkerInfo] = {}
        for one in (info for broker in self._all() for info in broker.workers()):
            before = found.get(one.session)
            holding = one.holding + (before.holding if before else 0)
            found[one.session] = WorkerInfo(
                session=one.session,
                name=one.name,
                host=one.host,
                pid=one.pid,
                queues=one.queues,
                started_at=one.started_at,
                beat_at=max(one.beat_at, before.beat_at) if before else one.beat_at,
                holding=holding,
            )
        return list(found.values())

    def purge(self, queue: str) -> int:
        (rows,) = self.cluster.ask(
            [command_at(b"ZRANGE", self._go_key, b"0", b"-1")],
            doing="purging a queue",
            away=BrokerUnavailable,
        )
        theirs = [
            body for body in rows if (said := known(body)) is not None and said.RoutingKey == queue
        ]
        gone = 0
        if theirs:
            (gone,) = self.cluster.ask(
                [command_at(b"ZREM", self._go_key, *theirs)],
                doing="purging a queue",
                away=BrokerUnavailable,
            )
        return int(gone) + self._of(queue).purge(queue)

    def pause(self, queue: str) -> None:
        self._register([queue])
        self._of(queue).pause(queue)

    def resume(self, queue: str) -> None:
        self._of(queue).resume(queue)

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        letters = [
            letter
            for broker in ([self._of(queue)] if queue else self._all())
            for letter in broker.dead_letters(limit=limit, queue=broker.queue)
        ]
        letters.sort(key=lambda letter: letter.died_at, reverse=True)
        return letters[:limit]

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        self._of(queue).bury(message, queue=queue, reason=reason, error=error)

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        queues = {id: id.partition("@")[2] for id in ids}
        return [
            letter
            for id, queue in queues.items()
            if is_usable(queue)
            for letter in self._of(queue).take_dead([id])
        ]

    def concerns(self) -> list[Concern]:
        return self.cluster.concerns()

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)


def is_usable(queue: str) -> bool:
    """Whether our keys for a queue of this name are in the slot of its list."""
    try:
        name, prefix = map(str.encode, queue_keys(queue))
    except UnicodeEncodeError:
        return False
    return bool(queue) and slot_of(name) == slot_of(prefix)


def name_of_move(body: bytes, score: bytes) -> str:
    """The same for each mover of this member."""
    return f"move {hashlib.sha1(body).hexdigest()} {score.decode()}"
