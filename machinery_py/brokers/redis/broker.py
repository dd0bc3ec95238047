"""Messages in Redis, in Go Machinery's keys; what they are stands in docs/explanation/redis-protocol.md.

A consumer that has not beaten for a lease, by the server's clock, is given up at the second look; one whose process on this
host has ended, at the first.

Limits: one server; in a cluster it is the broker of one queue (cluster.py).
"""

from __future__ import annotations

import collections
import itertools
import math
import time
import weakref
from collections.abc import Iterable, Sequence
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
from machinery_py.brokers.liveness import HeartbeatJudge, SessionInfo, has_ended, read_record
from machinery_py.brokers.redis import inspect as redis_looking
from machinery_py.brokers.redis import scripts as redis_scripts
from machinery_py.brokers.redis.consumer import KIND, RedisConsumer, began_by
from machinery_py.brokers.redis.messages import (
    EMPTY,
    Packed,
    Queues,
    head_of,
    known,
    label_of,
    letter_of,
    message_of,
    noted,
    packed,
    unwrapped,
)
from machinery_py.clock import moment_of
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.keys import QUEUES, queue_keys
from machinery_py.connections.redis.scripts import Script, pack
from machinery_py.connections.session_files import host_folder, remove
from machinery_py.errors import BrokerUnavailable, NameRefused, PublishUnknown
from machinery_py.names import REASON, check_queue
from machinery_py.texts import get_logger

logger = get_logger(__name__)

FIRST_QUEUE = "machinery_tasks"  # of messages that name none
LEASE = 10.0  # seconds without a beat until a consumer is given up
MOVE = 500  # delayed messages that are moved in one step
COUNT = 2000  # delayed messages that are looked at in one step
PATIENCE = 0.5  # seconds that one call of `tend` moves them: who has a million to move must not miss its beats
OTHERS = 50  # queues of others that are looked at in one step, in turn: an idle worker must not ask for ten thousand
RECORDS = 1000  # sessions whose records are remembered, as far as nobody saw them end


_pending = msgspec.msgpack.Decoder(list[tuple[int, bytes | None, bytes]]).decode
_late = msgspec.msgpack.Decoder(list[tuple[bytes, int, bytes]]).decode


class RedisBroker(Broker):
    """Queues on the driver's server. The driver belongs to whoever made it."""

    features = BrokerFeatures(name="redis")

    def __init__(self, driver: RedisDriver, *, lease: float = LEASE) -> None:
        self.driver = driver
        self.lease = lease
        self._own: dict[str, None] = {}  # queues that this process has consumers of
        self._cursor = b"0"  # where the next look at queues of others begins
        # The server says whose beat is late; a second look, a little later, makes sure.
        self._judge: HeartbeatJudge[bytes] = HeartbeatJudge(patience=lease / 8, lease=lease)
        self._doubtful: list[str] = []  # the queues of the suspects
        self._records: dict[bytes, SessionInfo | None] = {}
        self._consumers: weakref.WeakSet[RedisConsumer] = weakref.WeakSet()

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        queues = Queues()
        rows = [packed(message, queues) for message in messages]
        argument = pack((self.driver.now(), token, queues.keys, rows))
        to_wake = self.driver.run(
            redis_scripts.PUT,
            argument,
            doing="publishing",
            away=BrokerUnavailable,
            again=bool(token),
            lost=PublishUnknown,
        )
        if to_wake == 0:
            return False
        self.driver.unblock(to_wake)
        return True

    def consume(self, queues: Sequence[str], *, worker: str) -> RedisConsumer:
        consumer = RedisConsumer(self.driver, tuple(queues), worker=worker, move_due=self._move_due)
        self._consumers.add(consumer)
        self._own.update(dict.fromkeys(queues))
        return consumer

    def _run(self, script: Script, *values: object, doing: str) -> Any:
        return self.driver.run(script, pack(values), doing=doing, away=BrokerUnavailable)

    def _queues(self) -> list[tuple[str, str]]:
        names = self.driver.ask(b"SMEMBERS", QUEUES, doing="listing queues", away=BrokerUnavailable)
        return [
            queue_keys(name) for name in sorted(name.decode(errors="replace") for name in names)
        ]

    # House-keeping

    def _looked_after(self) -> list[tuple[str, str]]:
        """Our queues, those of suspects, and some others: where no worker is, what is late is late for nobody."""
        self._cursor, names = self.driver.ask(
            b"SSCAN",
            QUEUES,
            self._cursor,
            b"COUNT",
            b"%d" % OTHERS,
            doing="listing queues",
            away=BrokerUnavailable,
        )
        others = sorted(name.decode(errors="replace") for name in names)
        return [queue_keys(name) for name in dict.fromkeys([*self._own, *self._doubtful, *others])]

    def tend(self) -> float:
        due_in, late, sessions, to_wake = self._run(
            redis_scripts.LOOK,
            self.driver.now(),
            self._looked_after(),
            int(self.lease * 1e6),
            doing="looking after queues",
        )
        self.driver.unblock(to_wake)
        self._learn(sessions)
        self._doubtful = [queue.decode(errors="replace") for queue, _, _ in late]
        beats = {session: beat for _, session, beat in late}
        for session in self._judge.dead(beats, self.driver.clock.monotonic()):
            info = self._records.get(session)
            if info is not None:
                self._condemn(session, info.queues, beats[session].decode())
        if due_in == 0:
            self._move_due(PATIENCE)
            return 0.0
        interval = self.lease / 4
        return interval if due_in < 0 else min(interval, due_in / 1e6)

    def _learn(self, sessions: Iterable[tuple[bytes, bytes]]) -> None:
        """Read what sessions that are new to us say of themselves; condemn those whose process has ended."""
        there: dict[bytes, bytes] = {session: queue for queue, session in sessions}
        # Several workers of one process may be here at the same time.
        for session in self._records.keys() - there.keys() if len(self._records) > RECORDS else ():
            self._records.pop(session, None)
        for session, queue in there.items():
            if session not in self._records:
                key = f"{queue_keys(queue.decode())[1]}b:{session.decode()}".encode()
                record = self.driver.ask(
                    b"GET", key, doing="looking at a worker", away=BrokerUnavailable
                )
                self._records[session] = read_record(record)
            info = self._records.get(session)
            if info is not None and has_ended(info):
                self._condemn(session, info.queues, "")

    def _condemn(self, session: bytes, queues: Sequence[str], beat: str) -> None:
        if self._give_up(session.decode(), queues, beat):
            remove(host_folder(KIND), session.decode())

    def _give_up(self, session: str, queues: Sequence[str], beat: str) -> bool:
        """Give back what it held, if it has not beaten since. False: it has, or somebody was faster."""
        began = began_by(session, queues)
        held, to_wake = self._run(
            redis_scripts.CONDEMN,
            self.driver.now(),
            session,
            [queue_keys(queue) for queue in queues],
            beat,
            False if began is None else began,
            redis_scripts.TOMBSTONE,
            doing="giving a dead worker's messages back",
        )
        self.driver.unblock(to_wake)
        return bool(held >= 0)

    def _move_due(self, patience: float = math.inf) -> None:
        """Bring what is due in Go's delayed set to its queues, the oldest first; one step, and more for so many seconds."""
        end = time.monotonic() + patience
        while True:
            bodies = self._run(
                redis_scripts.DUE, self.driver.now(), MOVE, doing="looking for due messages"
            )
            if not bodies:
                return
            try:
                self._move(bodies)
            except NameRefused:
                for body in bodies:
                    try:
                        self._move([body])
                    except NameRefused as error:
                        self._bury(body, str(error))
            if len(bodies) < MOVE or time.monotonic() >= end:
                return

    def _move(self, bodies: Sequence[bytes]) -> None:
        queues = Queues()
        rows: list[Packed] = []
        for body in bodies:
            said = known(body)
            # Bytes that say no queue stay visible where somebody will bury them.
            queue = (said.RoutingKey if said else "") or FIRST_QUEUE
            check_queue(queue)
            priority = said.Priority if said and 0 <= said.Priority <= 255 else 0
            rows.append((queues.place(queue), priority, 0, EMPTY, 0, raw(body)))
        self.driver.unblock(
            self._run(
                redis_scripts.MOVE,
                self.driver.now(),
                queues.keys,
                rows,
                doing="moving due messages",
            )
        )

    def _bury(self, body: bytes, error: str) -> None:
        """Bring a delayed message whose queue cannot be one to the dead letters of a queue that somebody looks at."""
        logger.error(
            "a delayed message goes to the dead letters of %r: %s: %s", FIRST_QUEUE, REASON, error
        )
        self._run(
            redis_scripts.BURY,
            self.driver.now(),
            queue_keys(FIRST_QUEUE),
            raw(body),
            head_of("", "", REASON, error),
            doing="burying a delayed message",
        )

    # Looking

    def pending(self, queue: str, limit: int) -> list[Message]:
        self._move_due()
        rows = _pending(
            self._run(redis_looking.PENDING, queue_keys(queue), limit, doing="listing a queue")
        )
        found: list[Message] = []
        for priority, note, body in rows:
            parks, label = noted(note) if note else (0, b"")
            found.append(message_of(body, queue=queue, label=label, priority=priority, parks=parks))
        return found

    def delayed(self, limit: int) -> list[Message]:
        rows = _late(
            self._run(redis_looking.LATE, self._queues(), limit, doing="listing delayed messages")
        )
        found: list[tuple[int, Message]] = []
        for queue, due, member in rows:
            if queue:
                priority, parks, label, body = unwrapped(member)
                message = message_of(
                    body, queue=queue.decode(), label=label, priority=priority, parks=parks, due=due
                )
            else:
                said = known(member)
                message = message_of(
                    member,
                    queue=said.RoutingKey if said else "",
                    priority=said.Priority if said else 0,
                    due=due,
                )
            found.append((due, message))
        found.sort(key=lambda one: one[0])
        return [message for _, message in found[:limit]]

    def stats(self) -> list[QueueStats]:
        self._move_due()
        queues = self._queues()
        lines, to_wake = self._run(
            redis_looking.STATS, self.driver.now(), queues, doing="counting messages"
        )
        self.driver.unblock(to_wake)
        late = self._late_by_queue()
        return [
            QueueStats(
                queue=queue,
                waiting=waiting,
                running=running,
                delayed=parked + late[queue],
                dead=dead,
                oldest_at=moment_of(int(oldest)) if oldest else None,
                paused=bool(paused),
            )
            for (queue, _), (waiting, running, parked, dead, oldest, paused) in zip(
                queues, lines, strict=True
            )
        ]

    def _late_by_queue(self) -> collections.Counter[str]:
        """How many messages in Go's delayed set there are for each queue. In steps: a million at once would stop the server."""
        counts: collections.Counter[str] = collections.Counter()
        for start in itertools.count(0, COUNT):
            looked, names = self._run(
                redis_looking.LATE_NAMES, start, COUNT, doing="counting delayed messages"
            )
            for name, count in names:
                counts[_unquoted(name)] += count
            if looked < COUNT:
                break
        return counts

    def workers(self) -> list[WorkerInfo]:
        queues = self._queues()
        lines = self._run(redis_looking.WORKERS, queues, doing="listing workers")
        found: dict[bytes, WorkerInfo] = {}
        for line in lines:
            for session, beat, holding, record in line:
                info = read_record(record)
                if info is None or has_ended(info):
                    continue
                already = found[session].holding if session in found else 0
                found[session] = info.worker(
                    session.decode(), beat_at=int(beat), holding=holding + already
                )
        return list(found.values())

    def purge(self, queue: str) -> int:
        ours: list[msgspec.Raw] = []
        for start in itertools.count(0, COUNT):
            place = b"%d" % start, b"%d" % (start + COUNT - 1)
            members = self.driver.ask(
                b"ZREVRANGE",
                self.driver.limits.delayed_key.encode(),
                *place,
                doing="purging a queue",
                away=BrokerUnavailable,
            )
            ours += [
                raw(member)
                for member in members
                if (said := known(member)) is not None and said.RoutingKey == queue
            ]
            if len(members) < COUNT:
                break
        steps = [ours[start : start + COUNT] for start in range(0, len(ours), COUNT)] or [[]]
        return sum(
            int(self._run(redis_looking.PURGE, queue_keys(queue), step, doing="purging a queue"))
            for step in steps
        )

    def pause(self, queue: str) -> None:
        self.driver.unblock(
            self._run(redis_looking.PAUSE, queue_keys(queue), doing="pausing a queue")
        )

    def resume(self, queue: str) -> None:
        self.driver.unblock(
            self._run(redis_looking.RESUME, queue_keys(queue), doing="resuming a queue")
        )

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        queues = [queue_keys(queue)] if queue else self._queues()
        found = self._run(redis_looking.DEAD, queues, limit, doing="listing dead letters")
        letters = [
            letter_of(number.decode(), name, raw)
            for (name, _), line in zip(queues, found, strict=True)
            for number, raw in line
            if raw
        ]
        letters.sort(
            key=lambda letter: (letter.died_at, int(letter.id.partition("@")[0])), reverse=True
        )
        return letters[:limit]

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        self._run(
            redis_looking.BURY,
            self.driver.now(),
            queue_keys(queue),
            head_of(message.uuid, message.name, reason, error),
            raw(label_of(message)),
            raw(message.body),
            doing="burying a message",
        )

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        places = [
            (number, queue)
            for number, at, queue in (id.partition("@") for id in dict.fromkeys(ids))
            if at and queue
        ]
        argument = pack(([(queue_keys(queue), number) for number, queue in places],))
        found = self.driver.run(
            redis_looking.TAKE_DEAD,
            argument,
            doing="taking dead letters",
            away=BrokerUnavailable,
            again=False,
        )
        return [
            letter_of(number, queue, raw)
            for (number, queue), raw in zip(places, found, strict=True)
            if raw
        ]

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)


def _unquoted(name: bytes) -> str:
    try:
        return msgspec.json.decode(name, type=str)
    except msgspec.DecodeError:
        return ""
