"""Messages in Redis, in Go Machinery's keys; connections/redis/keys.py lists all keys.

A consumer that has not beaten for a lease, by the server's clock, is given up when others have
seen that for most of another one; one whose process on this host has ended, at the first look.

Limits: one server; in a cluster one master.
"""

from __future__ import annotations

import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from machinery_py.bounds import PURGE_STEP, STEP_BYTES, in_steps, pieces
from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
    size_of_message,
)
from machinery_py.brokers.entries import close_all
from machinery_py.brokers.liveness import (
    HeartbeatJudge,
    SessionInfo,
    has_ended,
    log_loss,
    read_record,
)
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.consumer import KIND, RedisConsumer, began_by, give_up
from machinery_py.brokers.redis.messages import (
    bodies_for,
    full,
    head_of,
    label_of,
    letter_of,
    message_of,
    message_of_go,
    message_parked,
    named,
    near,
    noted,
    packed_batch,
    packed_limits,
)
from machinery_py.brokers.redis.mover import MOVE, DueMover
from machinery_py.brokers.redis.topics import RedisSubscription, append_records
from machinery_py.clock import moment_of
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.errors import log_spoilt
from machinery_py.connections.redis.keys import QUEUES, queue_keys
from machinery_py.connections.redis.scripts import Script
from machinery_py.connections.session_files import host_folder, remove
from machinery_py.errors import BrokerUnavailable, PublishRefused, PublishUnknown
from machinery_py.rows import suspects
from machinery_py.texts import get_logger
from machinery_py.values.malformed import MALFORMED

logger = get_logger(__name__)

LEASE = 10.0  # seconds without a beat until a consumer is given up
ROOM = MOVE  # messages in a list, to which house-keeping then brings no more that are due
FIRST_STEP = 20  # messages of a purge's first step, whose sizes nobody knows
COUNT = 2000  # delayed messages that are looked at in one step
PATIENCE = 0.5  # seconds that one `tend` moves delayed messages: a million must not delay the beats
OTHERS = 50  # queues of others that are looked at in one step: there may be ten thousand
LETTERS = 1000  # dead letters in one step
RECORDS = 1000  # sessions whose records are remembered, as far as their end was not seen


_SESSION = re.compile(rb"[\w.:@-]+")
_pending = msgspec.msgpack.Decoder(list[tuple[int, bytes | None, bytes]]).decode
_late = msgspec.msgpack.Decoder(list[tuple[bytes, int | float, bytes]]).decode


class RedisBroker(Broker):
    """Queues on the driver's server. The driver belongs to its creator."""

    features: BrokerFeatures = BrokerFeatures(
        name="redis",
        beats=True,
        topics=True,
        keeps_topics=True,
        exact_limits=True,
        fair=True,
        forgets_queues=True,
    )

    def __init__(self, driver: RedisDriver, *, lease: float = LEASE) -> None:
        self.driver = driver
        self.lease = lease
        self.mover: DueMover = DueMover(driver)
        self._own: dict[str, None] = {}  # queues that this process has consumers of
        self._cursor = b"0"  # where the next look at queues of others begins
        # The server says whose beat is late: after an outage, all.
        patience = suspects.PATIENCE * lease
        self.judge: HeartbeatJudge[bytes] = HeartbeatJudge(patience=patience, lease=lease)
        self._doubtful: list[str] = []  # the queues of the suspects
        self._records: dict[bytes, SessionInfo | None] = {}
        self._consumers: weakref.WeakSet[RedisConsumer] = weakref.WeakSet()

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        return self.put_within(messages, (), token=token)

    def put_within(
        self, messages: Sequence[Message], limits: Sequence[QueueLimit], *, token: str
    ) -> bool:
        most = max(1, len(messages))
        first, *others = list(pieces(messages, size_of_message, most=most)) or [()]
        is_new, at = self._put(first, limits, token), len(first)
        for step in others:
            try:
                # Under a name of its own: a repeat goes on where this one is cut off.
                self._put(step, (), token and f"{token}/{at}")
            except PublishRefused as error:
                raise _cut_off(error, at, len(messages), token) from error
            at += len(step)
        return is_new

    def _put(self, messages: Sequence[Message], limits: Sequence[QueueLimit], token: str) -> bool:
        keys, rows = packed_batch(messages)
        values = (self.driver.now(), token, packed_limits(limits, keys), keys, rows)
        to_wake = self.driver.run(scripts.PUT, *values, again=bool(token), lost=PublishUnknown)
        if to_wake == 0:
            return False
        if isinstance(to_wake, bytes):
            raise full(to_wake, limits, keys)
        self.driver.unblock(to_wake)
        return True

    def waiting(self, queue: str) -> int:
        return int(self.driver.run(scripts.WAITING, queue_keys(queue)))

    def consume(self, queues: Sequence[str], *, worker: str) -> RedisConsumer:
        consumer = RedisConsumer(
            self.driver, tuple(queues), worker=worker, mover=self.mover, own=self._own
        )
        self._consumers.add(consumer)
        return consumer

    def beat_for(self, session: str, queues: Sequence[str], *, stalled: bool) -> bool:
        keys = list(map(queue_keys, self.queues_of(session, queues)))
        return bool(self.driver.run(scripts.BEAT, self.driver.now(), session, keys, stalled))

    def _ask(self, *parts: bytes, doing: str) -> Any:
        return self.driver.ask(*parts, doing=doing, away=BrokerUnavailable)

    def _run_and_wake(self, script: Script, *values: object) -> None:
        """Run a script that returns the clients to be woken."""
        self.driver.unblock(self.driver.run(script, *values))

    def _queues(self) -> list[tuple[str, str]]:
        return list(map(queue_keys, named(self._ask(b"SMEMBERS", QUEUES, doing="listing queues"))))

    # House-keeping

    def _queues_to_tend(self) -> list[tuple[str, str]]:
        """Return our queues, those of suspects, and some of those without a worker."""
        self._cursor, names = self._ask(
            b"SSCAN", QUEUES, self._cursor, b"COUNT", b"%d" % OTHERS, doing="listing queues"
        )
        queues = dict.fromkeys([*self._own, *self._doubtful, *named(names)])
        return list(map(queue_keys, queues))

    def tend(self) -> float:
        due_in, late, sessions, to_wake, *more = self.driver.run(
            scripts.LOOK, self.driver.now(), self._queues_to_tend(), int(self.lease * 1e6)
        )
        self.driver.unblock(to_wake)
        for queue, session in sessions:
            if not is_session(session):
                self._take_out(queue, session)
        late = [row for row in late if is_session(row[1])]
        self._condemn_dead([row for row in sessions if is_session(row[1])])
        self._doubtful = [queue.decode(errors="replace") for queue, _, _ in late]
        beats = {session: beat for _, session, beat in late}
        for session in self.judge.dead(beats, self.driver.clock.monotonic()):
            queue = next(queue for queue, late_session, _ in late if late_session == session)
            info = self._read_record(session, queue)  # anew: it may serve others by now
            if info is not None:
                self._condemn(session, (*info.queues, *info.left), beats[session].decode())
        interval = 0.0 if more else self.lease / 4
        if due_in == 0:
            return 0.0 if self._move_some() else interval
        return interval if due_in < 0 else min(interval, due_in / 1e6)

    def _move_some(self) -> bool:
        """Move what is due to lists in which few wait, for a moment; return whether any was."""
        end = time.monotonic() + PATIENCE
        moved = found = self.mover.step(room=ROOM)
        while found >= MOVE and time.monotonic() < end:
            found = self.mover.step(room=ROOM)
        return moved > 0

    def _take_out(self, queue: bytes, member: bytes) -> None:
        key = f"{queue_keys(queue.decode())[1]}s"
        logger.error("member %r of key %r is no session, and is taken out", member, key)
        self._ask(b"ZREM", key.encode(), member, doing="taking out what is no session")

    def _condemn_dead(self, sessions: Iterable[tuple[bytes, bytes]]) -> None:
        """Read the records of sessions that are new to us; condemn those whose process ended."""
        there: dict[bytes, bytes] = {session: queue for queue, session in sessions}
        # Several workers of one process may be here at the same time.
        for session in self._records.keys() - there.keys() if len(self._records) > RECORDS else ():
            self._records.pop(session, None)
        for session, queue in there.items():
            if session not in self._records:
                self._read_record(session, queue)
            info = self._records.get(session)
            if info is not None and has_ended(info):
                info = self._read_record(session, queue) or info
                self._condemn(session, (*info.queues, *info.left), "")

    def queues_of(self, session: str, known: Sequence[str]) -> Sequence[str]:
        """Return all queues in which a session is registered, of which these were its first."""
        info = self._read_record(session.encode(), known[0].encode())
        return (*info.queues, *info.left) if info is not None else known

    def _read_record(self, session: bytes, queue: bytes) -> SessionInfo | None:
        key = f"{queue_keys(queue.decode())[1]}b:{session.decode()}".encode()
        record = read_record(self._ask(b"GET", key, doing="looking at a worker"))
        self._records[session] = record
        return record

    def _condemn(self, session: bytes, queues: Sequence[str], beat: str) -> None:
        if self._give_up(session.decode(), queues, queues, beat):
            log_loss(self._records.get(session), has_ended=not beat)
            remove(host_folder(KIND), session.decode())

    def _give_up(
        self, session: str, queues: Sequence[str], served: Sequence[str], beat: str
    ) -> bool:
        """Give back what it held of `queues`; it served all of `served`.

        Returns False if it has beaten since, or another worker was faster.
        """
        keys, began = list(map(queue_keys, queues)), began_by(session, queues, served)
        strikes = False if began is None else began
        return give_up(self.driver, session, keys, beat, strikes, scripts.TOMBSTONE)

    # Inspection

    def pending(self, queue: str, limit: int) -> list[Message]:
        while self.mover.step():
            pass
        found: list[Message] = []
        is_whole = False
        while not is_whole and len(found) < limit:
            values = (queue_keys(queue), limit - len(found), len(found))
            rows = _pending(self.driver.run(scripts.PENDING, *values))
            is_whole = sum(len(body) for _, _, body in rows) < STEP_BYTES
            for priority, note, body in rows:
                parks, label = noted(note) if note else (0, b"")
                found.append(
                    message_of(body, queue=queue, label=label, priority=priority, parks=parks)
                )
        return found

    def delayed(self, limit: int) -> list[Message]:
        queues, place, left_out = self._queues(), 0, 0
        rows: list[tuple[bytes, int | float, bytes]] = []
        while place >= 0:
            values = (queues, limit, place, left_out)
            packed, place, left_out = self.driver.run(scripts.LATE, *values)
            rows += _late(packed)
        found: list[tuple[int, Message]] = []
        for queue, score, member in rows:
            due = near(score)
            if queue:
                message = message_parked(member, queue.decode(), due)
            else:
                message = message_of_go(member, due)
            found.append((due, message))
        found.sort(key=lambda one: one[0])
        return [message for _, message in found[:limit]]

    def stats(self) -> list[QueueStats]:
        self.mover.step(room=ROOM)
        queues = self._queues()
        values = (self.driver.now(), queues, COUNT)
        lines, first, problems = self.driver.run(scripts.STATS, *values)
        log_spoilt(problems, doing=scripts.STATS.doing)
        late, due = self._late_by_queue(*first)
        return [
            QueueStats(
                queue=queue,
                waiting=waiting + due[queue],
                running=running,
                delayed=parked + late[queue],
                dead=dead,
                oldest_at=moment_of(near(float(oldest))) if oldest else None,
                paused=bool(paused),
            )
            for (queue, _), line in zip(queues, lines, strict=True)
            for waiting, running, parked, dead, oldest, paused in ([line] if line else ())
        ]

    def _late_by_queue(self, looked: int, names: list[Any]) -> tuple[Counter[str], Counter[str]]:
        """Count the messages in Go's set by queue: those that are late, and those that are due.

        In steps, since it may hold a million.
        """
        late, due = Counter[str](), Counter[str]()
        start = 0
        while looked:
            for name, not_due, is_due in names:
                late[_unquoted(name)] += not_due
                due[_unquoted(name)] += is_due
            start += looked
            looked, names = self.driver.run(scripts.LATE_NAMES, self.driver.now(), start, COUNT)
        return late, due

    def workers(self) -> list[WorkerInfo]:
        found: dict[bytes, WorkerInfo] = {}
        for line in self.driver.run(scripts.WORKERS, self._queues()):
            for session, beat, holding, record in line:
                info = read_record(record)
                if info is None or has_ended(info) or not is_session(session):
                    continue
                already = found[session].holding if session in found else 0
                found[session] = info.worker(
                    session.decode(), beat_at=near(float(beat)), holding=holding + already
                )
        return list(found.values())

    def purge(self, queue: str) -> int:
        ours = list(map(raw, self._late_for(queue)))
        steps = [*in_steps(ours, COUNT)] or [[]]
        return sum(int(self.driver.run(scripts.PURGE, queue_keys(queue), step)) for step in steps)

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        keys = queue_keys(queue)
        left, size = self.waiting(queue), FIRST_STEP
        yield from self._purge_delayed(keys, before)  # before others are sent to it, late
        while left > 0 and (found := self.pending(queue, min(left, size))):
            left -= len(found)
            before(found)
            yield self._without(keys, found)
            weight = max(1, sum(len(one.body) for one in found))
            size = max(1, min(PURGE_STEP, len(found) * STEP_BYTES // weight))

    def _purge_delayed(
        self, keys: tuple[str, str], before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        parked = f"{keys[1]}z".encode()
        found: list[tuple[Message, bytes, bool]] = []
        for member, due in self.sorted_set(parked, doing="purging a queue"):
            found.append((message_parked(member, keys[0], int(float(due))), member, True))
        for member in self._late_for(keys[0]):
            found.append((message_of_go(member, 0), member, False))
        for some in pieces(found, lambda one: len(one[1]), most=PURGE_STEP):
            before([message for message, _, _ in some])
            rows = [(is_parked, raw(member)) for _, member, is_parked in some]
            gone = self.driver.run(scripts.UNPARK, keys, rows, again=False)
            yield [message for (message, _, _), one in zip(some, gone, strict=True) if one]

    def _late_for(self, queue: str) -> list[bytes]:
        """Return the members of Go's delayed set that are for this queue."""
        key = self.driver.limits.delayed_key.encode()
        found = self.sorted_set(key, doing="purging a queue")
        return bodies_for(queue, (member for member, _ in found))

    def sorted_set(self, key: bytes, *, doing: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield members and scores of a sorted set in steps, the last first.

        One that comes meanwhile may be left out; one that goes may hide another.
        """
        start, size = 0, FIRST_STEP
        while True:
            place = b"%d" % start, b"%d" % (start + size - 1), b"WITHSCORES"
            found = self._ask(b"ZREVRANGE", key, *place, doing=doing)
            yield from zip(found[::2], found[1::2], strict=True)
            count, weight = len(found) // 2, sum(map(len, found))
            if count < size:
                return
            start, size = start + count, max(1, min(COUNT, count * STEP_BYTES // weight))

    def _without(self, keys: tuple[str, str], messages: Sequence[Message]) -> list[Message]:
        """Delete these messages, which were the first of a queue; return those that were there."""
        bodies = [raw(one.body) for one in messages]
        gone = self.driver.run(scripts.REMOVE, keys, bodies, again=False)
        return [message for message, one in zip(messages, gone, strict=True) if one]

    def forget_queue(self, queue: str) -> bool:
        if any(one.queue == queue and one.delayed for one in self.stats()):
            return False  # what is delayed meanwhile makes the queue anew when it is due
        return bool(self.driver.run(scripts.FORGET, queue_keys(queue)))

    def pause(self, queue: str) -> None:
        self._run_and_wake(scripts.PAUSE, queue_keys(queue))

    def resume(self, queue: str) -> None:
        self._run_and_wake(scripts.RESUME, queue_keys(queue))

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        queues = [queue_keys(queue)] if queue else self._queues()
        newest = [
            (float(died_at), int(number), name)
            for (name, _), line in zip(
                queues, self.driver.run(scripts.DEAD, queues, limit), strict=True
            )
            for number, died_at in zip(line[::2], line[1::2], strict=True)
            if number.isdigit()  # others are none of ours
        ]
        newest.sort(key=lambda one: one[:2], reverse=True)
        return self._letters([(str(number), name) for _, number, name in newest[:limit]])

    def _letters(
        self, places: Sequence[tuple[str, str]], script: Script = scripts.LETTERS
    ) -> list[DeadLetter]:
        """Return the letters with these numbers and queues that are there, in as many steps."""
        letters: list[DeadLetter] = []
        rows = [(queue_keys(queue), number) for number, queue in places]
        at = 0
        while at < len(places):
            again = script is scripts.LETTERS
            found = self.driver.run(script, rows[at : at + LETTERS], again=again)
            letters += [
                letter_of(number, queue, letter)
                for (number, queue), letter in zip(places[at:], found, strict=False)
                if letter
            ]
            at += len(found)
        return letters

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        head = head_of(message.uuid, message.name, reason, error)
        label, body = raw(label_of(message)), raw(message.body)
        self.driver.run(scripts.BURY, self.driver.now(), queue_keys(queue), head, label, body)

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        places = [
            (number, queue)
            for number, at, queue in (id.partition("@") for id in dict.fromkeys(ids))
            if at and queue
        ]
        return self._letters(places, scripts.TAKE_DEAD)

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        append_records(self.driver, topic, records, ttl)

    def subscribe(self, topic: str, *, since: float = 0.0) -> RedisSubscription:
        return RedisSubscription(self.driver, topic, since)

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)


def is_session(name: bytes) -> bool:
    """Return whether a member of a registry may be a session, which has files of its name, too."""
    return _SESSION.fullmatch(name) is not None


def _cut_off(
    error: PublishRefused, at: int, count: int, token: str
) -> PublishRefused | PublishUnknown:
    """Return the error for a batch of which all in front of `at` are stored."""
    kind = PublishUnknown if token else PublishRefused
    cut_off = kind(f"{at:,} of {count:,} messages are stored, and the others are not: {error}")
    cut_off.permanent, cut_off.left = error.permanent, frozenset(range(at, count))
    return cut_off


def _unquoted(name: bytes) -> str:
    try:
        return msgspec.json.decode(name, type=str)
    except MALFORMED:
        return ""
