"""Messages in a Redis Cluster: each queue has a broker of its own, in the slot of its name.

A queue has its own delayed messages, in its slot, so that they come to its list in one step. Go's
set (`redis.delayed_tasks_key`), in a slot of its own, is emptied into the queues: see `_move_due`.

Limits: messages for several queues are put queue by queue: after an error some may be there, and
others not (PublishUnknown). Delayed messages are brought to their queues by Python workers only.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from machinery_py.bounds import PURGE_STEP, pieces
from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import close_all
from machinery_py.brokers.liveness import log_loss
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.broker import LEASE, OTHERS, RedisBroker
from machinery_py.brokers.redis.cluster_consumer import ClusterConsumer, Place, ask_beats
from machinery_py.brokers.redis.messages import (
    Packed,
    Queues,
    bodies_for,
    message_of_go,
    named,
    packed,
    packed_go,
)
from machinery_py.brokers.redis.mover import FIRST_QUEUE, MOVE
from machinery_py.brokers.redis.topics import RedisSubscription, append_records
from machinery_py.clock import moment_of
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.cluster import RedisClusterDriver, SlotDriver
from machinery_py.connections.redis.keys import QUEUES, queue_keys, topic_key
from machinery_py.connections.redis.scripts import Script, with_delayed_key
from machinery_py.connections.redis.slots import slot_of
from machinery_py.errors import BrokerUnavailable, NameRefused, PublishRefused, PublishUnknown
from machinery_py.names import queue_problem
from machinery_py.texts import get_logger
from machinery_py.wire.decode import known_fields

MOVE_WITHIN = 300_000_000  # µs between the look at Go's set and the move; clocks differ by less
FOR_EVER = 2**53  # µs

_Move = tuple[str, Packed]

logger = get_logger(__name__)


class QueueBroker(RedisBroker):
    """One queue, in its slot."""

    def __init__(self, driver: SlotDriver, queue: str, *, lease: float) -> None:
        super().__init__(driver, lease=lease)
        self.slot = driver
        self.queue = queue
        self.is_known = False  # in the list of queues

    def put_once(self, moves: Sequence[_Move], latest: int) -> bool:
        """Put each message whose name was not used before. False: too late, nothing was done."""
        keys = queue_keys(self.queue)
        to_wake = self.driver.run(scripts.TAKE_IN, self.driver.now(), keys, moves, latest)
        if to_wake == 0:
            return False
        self.driver.unblock(to_wake)
        return True

    def _queues(self) -> list[tuple[str, str]]:
        return [queue_keys(self.queue)]

    def _queues_to_tend(self) -> list[tuple[str, str]]:
        return self._queues()

    def _condemn(self, session: bytes, queues: Sequence[str], beat: str) -> None:
        # The brokers of its other queues give back what it holds there; they read its file, too.
        if self._give_up(session.decode(), [self.queue], queues, beat):
            log_loss(self._records.get(session), has_ended=not beat)


class ClusterBroker(Broker):
    """Queues in a cluster, which belongs to its creator."""

    features: BrokerFeatures = BrokerFeatures(
        name="redis", beats=True, topics=True, keeps_topics=True, exact_limits=True, fair=True
    )

    def __init__(self, cluster: RedisClusterDriver, *, lease: float = LEASE) -> None:
        self.cluster = cluster
        self.lease = lease
        self._go_key = cluster.limits.delayed_key.encode()
        self._go_slot = queue_keys(cluster.limits.delayed_key)[1].encode()
        self._brokers: dict[str, QueueBroker] = {}
        self._own: dict[str, None] = {}  # queues that this process has consumers of
        self._cursor = b"0"  # where the next look at queues of others begins
        self._last = 0
        self._consumers: weakref.WeakSet[ClusterConsumer] = weakref.WeakSet()

    def _of(self, queue: str) -> QueueBroker:
        """The broker of this queue.

        Raises:
            NameRefused: its name has braces in such places that our keys for it would be in another
            slot.
        """
        broker = self._brokers.get(queue)
        if broker is None:
            if not is_usable(queue):
                raise NameRefused(
                    f"queue {queue!r}: its keys would be in several slots of a Redis Cluster "
                    "(expected a name without braces, or with one {…} in it)",
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
            self._ask(b"SADD", QUEUES, *map(str.encode, new), doing="naming queues")
            for queue in new:
                self._of(queue).is_known = True

    def _ask(self, *parts: bytes, doing: str) -> Any:
        return self.cluster.command(*parts, doing=doing, away=BrokerUnavailable)

    def _all(self) -> list[QueueBroker]:
        return list(map(self._of, named(self._ask(b"SMEMBERS", QUEUES, doing="listing queues"))))

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

    def put_within(
        self, messages: Sequence[Message], limits: Sequence[QueueLimit], *, token: str
    ) -> bool:
        """Exact for messages of one queue; else it looks at all queues first."""
        queues = list(dict.fromkeys(message.queue for message in messages))
        if len(queues) > 1:
            return super().put_within(messages, limits, token=token)
        self._register(queues)
        return self._of(queues[0]).put_within(messages, limits, token=token)

    def waiting(self, queue: str) -> int:
        return self._of(queue).waiting(queue)

    def put_once(self, messages: Sequence[tuple[str, Message]]) -> None:
        """Store each message, unless one was stored under the same name within half an hour.

        Raises:
            PublishRefused, BrokerUnavailable: some may have been stored; putting all of them again
            is safe.
        """
        parts: dict[str, list[_Move]] = {}
        for name, message in messages:
            queues = Queues([message.queue])
            parts.setdefault(message.queue, []).append((name, packed(message, queues)))
        self._register(list(parts))
        for queue, part in parts.items():
            self._of(queue).put_once(part, FOR_EVER)

    def consume(self, queues: Sequence[str], *, worker: str) -> ClusterConsumer:
        consumer = ClusterConsumer(queues, self._places_of, worker=worker, patience=self.lease / 4)
        self._consumers.add(consumer)
        return consumer

    def _places_of(self, queues: Sequence[str]) -> list[Place]:
        """Make queues known, which this process has a consumer of, and return their places."""
        self._register(queues)
        brokers = [self._of(queue) for queue in dict.fromkeys(queues)]
        self._own.update(dict.fromkeys(queues))
        return [(one.queue, one.slot, one.mover) for one in brokers]

    def beat_for(self, session: str, queues: Sequence[str], *, stalled: bool) -> bool:
        every = dict.fromkeys(self._of(queues[0]).queues_of(session, queues))
        slots = [(self._of(queue).slot, [queue_keys(queue)]) for queue in every]
        requests = [
            slot.request(scripts.BEAT, slot.now(), session, keys, stalled) for slot, keys in slots
        ]
        return all(ask_beats(self.cluster, requests, patience=self.lease / 4))

    # House-keeping

    def _brokers_to_tend(self) -> list[QueueBroker]:
        """As RedisBroker chooses its queues. Each costs a round trip."""
        self._cursor, names = self._ask(
            b"SSCAN", QUEUES, self._cursor, b"COUNT", b"%d" % OTHERS, doing="listing queues"
        )
        doubtful = [queue for queue, broker in list(self._brokers.items()) if broker.judge]
        return list(map(self._of, dict.fromkeys([*self._own, *doubtful, *named(names)])))

    def tend(self) -> float:
        brokers = self._brokers_to_tend()
        pause = self._move_due()
        for _ in brokers:
            # Once round. After a failure, which takes time, the next call begins behind that queue.
            self._last += 1
            pause = min(pause, brokers[self._last % len(brokers)].tend())
        return pause

    def _move_due(self) -> float:
        """Move what is due in Go's set to its queues; return the seconds until there is more.

            1  the queue   the message, if this move (its bytes and score) was not made yet
            2  Go's set    the message is removed

        A crash in between, or another mover, repeats 1, which does nothing, and then 2. A mover
        that slept in front of 1 for so long that the move could have been forgotten is too late,
        and does nothing.
        """
        interval = self.lease / 4
        while True:
            now, due, due_in = self._run_at_go(scripts.GO_DUE, self.cluster.now(), MOVE)
            if not due:
                return interval if due_in < 0 else min(interval, max(due_in / 1e6, 0.01))
            parts: dict[str, list[tuple[_Move, tuple[bytes, bytes]]]] = {}
            for body, score in due:
                said = known_fields(body)
                move = (name_of_move(body, score), packed_go(body, said, 0))
                queue = self._queue_for(said.RoutingKey if said else "")
                parts.setdefault(queue, []).append((move, (body, score)))
            self._register(list(parts))
            for queue, moves in parts.items():
                if self._put_once(queue, [move for move, _ in moves], int(now) + MOVE_WITHIN):
                    gone = [(raw(body), raw(score)) for _, (body, score) in moves]
                    self._run_at_go(scripts.GO_GONE, gone)

    def _put_once(self, queue: str, moves: Sequence[_Move], latest: int) -> bool:
        """As QueueBroker.put_once; messages that a spoilt queue cannot take come to FIRST_QUEUE."""
        try:
            return self._of(queue).put_once(moves, latest)
        except NameRefused as error:
            if queue == FIRST_QUEUE:
                raise
            logger.error("delayed messages of %r go to %r: %s", queue, FIRST_QUEUE, error)
            return self._of(FIRST_QUEUE).put_once(moves, latest)

    def _run_at_go(self, script: Script, *values: object) -> Any:
        """Run a script in the slot of Go's set."""
        script = with_delayed_key(script, self.cluster.limits.delayed_key)
        return self.cluster.run(script, [(self._go_slot, values)])[0]

    def _queue_for(self, routing_key: str) -> str:
        """Return the queue of a message of Go's: FIRST_QUEUE, if it names none that can be."""
        is_possible = not queue_problem(routing_key) and is_usable(routing_key)
        return routing_key if is_possible else FIRST_QUEUE

    def _gos_messages(self) -> list[Message]:
        rows = self._ask(
            b"ZRANGE", self._go_key, b"0", b"-1", b"WITHSCORES", doing="listing delayed messages"
        )
        return [
            message_of_go(body, int(float(score) / 1000 + 0.5))
            for body, score in zip(rows[::2], rows[1::2], strict=True)
        ]

    # Inspection

    def pending(self, queue: str, limit: int) -> list[Message]:
        self._move_due()
        return self._of(queue).pending(queue, limit)

    def delayed(self, limit: int) -> list[Message]:
        found = self._gos_messages()
        for broker in self._all():
            found += broker.delayed(limit)
        found.sort(key=lambda message: message.eta or moment_of(0))
        return found[:limit]

    def stats(self) -> list[QueueStats]:
        self._move_due()
        late = [message.queue for message in self._gos_messages()]
        return [
            msgspec.structs.replace(one, delayed=one.delayed + late.count(one.queue))
            for broker in self._all()
            for one in broker.stats()
        ]

    def workers(self) -> list[WorkerInfo]:
        found: dict[str, WorkerInfo] = {}
        for one in (info for broker in self._all() for info in broker.workers()):
            before = found.get(one.session, one)
            found[one.session] = msgspec.structs.replace(
                one,
                beat_at=max(one.beat_at, before.beat_at),
                holding=one.holding + (before.holding if before is not one else 0),
                stalled=one.stalled and before.stalled,
            )
        return list(found.values())

    def purge(self, queue: str) -> int:
        doing = "purging a queue"
        members = self._ask(b"ZRANGE", self._go_key, b"0", b"-1", doing=doing)
        gone = 0
        if gos := bodies_for(queue, members):
            gone = self._ask(b"ZREM", self._go_key, *gos, doing=doing)
        return int(gone) + self._of(queue).purge(queue)

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        yield from self._of(queue).purge_each(queue, before)
        doing = "purging a queue"
        members = self._ask(b"ZRANGE", self._go_key, b"0", b"-1", doing=doing)
        gos = bodies_for(queue, members)
        for some in pieces(gos, len, most=PURGE_STEP):
            before([message_of_go(body, 0) for body in some])
            yield [
                message_of_go(body, 0)
                for body in some
                if self._ask(b"ZREM", self._go_key, body, doing=doing)
            ]

    def pause(self, queue: str) -> None:
        self._register([queue])
        self._of(queue).pause(queue)

    def resume(self, queue: str) -> None:
        self._of(queue).resume(queue)

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        brokers = [self._of(queue)] if queue else self._all()
        letters = [
            letter
            for broker in brokers
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

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        append_records(self._at_topic(topic), topic, records, ttl)

    def subscribe(self, topic: str, *, since: float = 0.0) -> RedisSubscription:
        return RedisSubscription(self._at_topic(topic), topic, since)

    def _at_topic(self, topic: str) -> SlotDriver:
        return self.cluster.at(topic_key(topic).encode())

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
    """Return the name of the move of this member, the same for each mover and version of Redis."""
    return f"move {hashlib.sha1(body).hexdigest()} {float(score)}"
