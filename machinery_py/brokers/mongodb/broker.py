"""Messages in MongoDB, a document each.

Fields: messages.py. Collections: connections/mongodb/collections.py. Protocol:
docs/explanation/mongodb-protocol.md.

A consumer whose heartbeat stays the same for a lease, by the clock of whoever looks, is given up;
one whose process on this host has ended, at once (brokers/liveness.py).

Limits: delayed messages go by the server's clock as each process has measured it. Without
transactions a batch becomes visible message by message.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import msgspec

from machinery_py.bounds import PURGE_STEP, STEP_BYTES, TOKEN_LIFE, pieces
from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import RETRY_MARK, SET_BACK, ClockWatch, close_all
from machinery_py.brokers.liveness import HeartbeatJudge, has_ended, log_loss, read_record
from machinery_py.brokers.mongodb.consumer import KIND, ORDER, MongoConsumer, beat_in
from machinery_py.brokers.mongodb.messages import (
    QUEUED,
    WAITS,
    Status,
    documents_of,
    letter_of,
    message_of,
    release,
    untake,
)
from machinery_py.brokers.mongodb.topics import NOTIFIER, MongoSubscription, write_records
from machinery_py.brokers.mongodb.turns import give_turns, promote_fair
from machinery_py.clock import moment_of
from machinery_py.connections.durability import Concern
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    insert_new,
    step,
)
from machinery_py.connections.session_files import host_folder, ran, remove
from machinery_py.errors import (
    BrokerUnavailable,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    for_good,
)
from machinery_py.texts import printable

LARGEST = 16 * 2**20 - 4096  # bytes of a message's body: a document has 16 MB
LEASE = 10.0  # seconds without a heartbeat until a consumer is given up
SWEEP = 60.0  # seconds between two looks for old tokens
INTENTS = 100  # submissions of dead senders that are carried out in one step

_PURGED = [Status.WAITING, Status.TAKEN, Status.DELAYED]

MESSAGES = "messages"  # kind of a token whose intent is messages alone

_pack = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Message]).decode


def _parts_of(token: str) -> Document:
    return {"_id": {"$gt": f"{token}/", "$lt": f"{token}0"}}  # 0 follows the stroke


def _intent_of(store: Store, document: Document) -> bytes | None:
    """Return the intent of a token, from its parts if it has some; None: another was faster."""
    count = document.get("parts", 0)
    if not count:
        return bytes(document["deed"])
    parts = list(store.machinery_parts.find(_parts_of(document["_id"])).sort([("_id", 1)]))
    return b"".join(bytes(one["part"]) for one in parts) if len(parts) == count else None


class MongoBroker(DriverUser, Broker):
    """Collections of the driver's database. The driver belongs to whoever made it."""

    features: BrokerFeatures = BrokerFeatures(
        name="mongodb",
        beats=True,
        topics=True,
        keeps_topics=True,
        fair=True,
        forgets_queues=True,
    )
    unavailable: ClassVar[type[MachineryError]] = BrokerUnavailable

    def __init__(self, driver: MongoDriver, *, lease: float = LEASE) -> None:
        super().__init__(driver)
        self.lease = lease
        self._judge: HeartbeatJudge[str] = HeartbeatJudge(patience=lease, lease=lease)
        self._named: set[str] = set()
        self._busy: set[str] = set()  # tokens of calls that are being carried out
        self._putting = ForkLock()
        self._consumers: weakref.WeakSet[MongoConsumer] = weakref.WeakSet()
        self._next_sweep = self._next_holders = 0.0
        self._watch = ClockWatch(driver.clock)

    # Publishing

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        if not token:
            self.store([("", messages)], again=False)
            return True
        self.check_sizes(messages)
        return self.once(token, MESSAGES, _pack(messages), lambda: self.store([(token, messages)]))

    def check_sizes(self, messages: Sequence[Message]) -> None:
        """Refuse a message that no document can hold, before anything is accepted."""
        for one in messages:
            if len(one.body) > LARGEST:
                raise for_good(
                    PublishRefused(
                        f"task {one.uuid} ({one.name}): its message has {len(one.body):,} bytes: "
                        "a document would be greater than MongoDB allows (16 MB)"
                    )
                )

    @step("looking for a submission")
    def was_put(self, store: Store, token: str) -> bool:
        return store.machinery_tokens.find_one({"_id": token}, {"_id": 1}) is not None

    def once(self, token: str, kind: str, intent: bytes, carry_out: Callable[[], object]) -> bool:
        """Carry out a submission that bears this token; False if that was done before.

        Token and intent are one document: once it is there, we or a later `tend` carry it out.
        The parts of an intent that is too large for a document are there before.
        """
        now = self.driver.now()
        parts = [
            {"_id": f"{token}/{start:012}", "at": now, "part": intent[start : start + STEP_BYTES]}
            for start in range(0, len(intent), STEP_BYTES)
        ]
        document: Document = {"_id": token, "at": now, "kind": kind, "deed": intent, "deed_at": now}
        is_large = len(parts) > 1
        if is_large:
            document |= {"deed": b"", "parts": len(parts)}

        def begin(store: Store) -> bool:
            if is_large:
                if store.machinery_tokens.find_one({"_id": token, "deed_at": 0}, {"_id": 1}):
                    return False
                for part in parts:
                    insert_new(store.machinery_parts, [part])
            if insert_new(store.machinery_tokens, [document])[0]:
                return True
            # Carried out before; or begun, by a call that lost a reply: this one does what is left.
            unfinished = {"_id": token, "deed_at": {"$gt": 0}}
            return store.machinery_tokens.find_one(unfinished, {"_id": 1}) is not None

        with self._putting:
            if token in self._busy:
                return False
            self._busy.add(token)
        try:
            if not self._publish(begin):
                return False
            try:
                carry_out()
                self.forget_intent(token, is_large=is_large)
            except MachineryError as error:
                raise PublishUnknown(
                    f"{error} (it was accepted, and is carried out by the next worker that looks)"
                ) from error
        finally:
            self._busy.discard(token)
        return True

    def _publish(self, work: Callable[[Store], object], *, again: bool = True) -> object:
        """Run the step by which something is accepted."""
        return self.driver.run(
            work,
            doing="publishing",
            away=BrokerUnavailable,
            again=again,
            lost=PublishUnknown,
            refused=PublishRefused,
        )

    def forget_intent(self, token: str, *, is_large: bool = True) -> None:
        """Note that an intent is carried out; `is_large`: it may have parts."""
        done: Document = {"$set": {"deed": b"", "deed_at": 0}}

        def forget(store: Store) -> None:
            store.machinery_tokens.update_one({"_id": token}, done)
            if is_large:
                store.machinery_parts.delete_many(_parts_of(token))

        self.driver.run(forget, doing="publishing", away=PublishUnknown)

    def store(
        self, batches: Sequence[tuple[str, Sequence[Message]]], *, again: bool = True
    ) -> None:
        """Store messages that are not there yet, under the names that their token gives them.

        Args:
            again: there are tokens, so that a repeat gives the same names, and does no harm.
        """
        now = self.driver.now()
        documents: list[Document] = []
        for token, messages in batches:
            first = self.driver.next_order(max(1, len(messages)))
            documents += documents_of(messages, token=token, first=first, now=now)
        if not documents:
            return
        queues = {document["queue"] for document in documents} - self._named

        def write(store: Store) -> None:
            if queues:
                insert_new(store.machinery_queues, [{"_id": queue} for queue in sorted(queues)])
            give_turns(store, documents, now)
            insert_new(store.machinery_messages, documents)

        if again:  # a part of what is accepted
            self.driver.run(write, doing="publishing", away=PublishUnknown)
        else:
            self._publish(write, again=False)
        self._named |= queues
        self.driver.notify("messages")

    def consume(self, queues: Sequence[str], *, worker: str) -> MongoConsumer:
        consumer = MongoConsumer(self.driver, tuple(queues), worker=worker, promote=self._promote)
        self._consumers.add(consumer)
        return consumer

    @step("beating")
    def beat_for(self, store: Store, session: str, queues: Sequence[str], *, stalled: bool) -> bool:
        del queues  # a session is one document
        return beat_in(store, session, now=self.driver.now(), stalled=stalled)

    # House-keeping

    def tend(self) -> float:
        self.look_at_sessions()
        for token, kind, intent in self.old_intents():
            if kind == MESSAGES:  # else it is for a store that can write states
                self.finish_put(token, intent)
        return self.tend_messages()

    def finish_put(self, token: str, intent: bytes) -> None:
        """Carry out a `put` whose caller has died."""
        self.store([(token, _decode(intent))])
        self.forget_intent(token)

    def tend_messages(self) -> float:
        """Bring due messages to their queues, and forget old tokens. Returns seconds as `tend`."""
        monotonic = self.driver.clock.monotonic()
        if monotonic >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP
            self._forget_tokens()
        if self._watch.was_set_back():
            self._count_again()
        due = self._promote()
        interval = self.lease / 4
        return interval if due is None else min(interval, max(0.0, (due - self.driver.now()) / 1e6))

    @step("moving retries")
    def _count_again(self, store: Store) -> None:
        """Let delays of retries that began in the future, by a clock that was ahead, begin now."""
        now, messages = self.driver.now(), store.machinery_messages
        begun: Document = {"status": Status.DELAYED, "sent_at": {"$gt": now + int(SET_BACK * 1e6)}}
        for one in messages.find(begun, {"body": 1, "sent_at": 1, "due_at": 1}):
            if RETRY_MARK in bytes(one["body"]):
                due_at = one["due_at"] - one["sent_at"] + now
                messages.update_one(
                    {**begun, "_id": one["_id"]}, {"$set": {"due_at": due_at, "sent_at": now}}
                )

    @step("looking for old tokens")
    def _forget_tokens(self, store: Store) -> None:
        before = self.driver.now() - TOKEN_LIFE * 1_000_000
        store.machinery_tokens.delete_many({"at": {"$lt": before}, "deed_at": 0})
        # Of senders that died before their token was there.
        parts = store.machinery_parts.find({"at": {"$lt": before}}, {"_id": 1})
        for token in {one["_id"].rpartition("/")[0] for one in parts}:
            if store.machinery_tokens.find_one({"_id": token, "deed_at": {"$gt": 0}}) is None:
                store.machinery_parts.delete_many(_parts_of(token))

    @step("looking for what is unfinished")
    def old_intents(self, store: Store) -> list[tuple[str, str, bytes]]:
        """Return token, kind and intent of submissions that were begun and not carried out."""
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.intents_before()}}
        return [
            (one["_id"], one["kind"], intent)
            for one in store.machinery_tokens.find(old).limit(INTENTS)
            if (intent := _intent_of(store, one)) is not None
        ]

    def _promote(self) -> int | None:
        """Bring due messages to their queues; return the moment at which the next one is due."""
        due, moved = self._move_due()
        if moved:
            self.driver.notify("messages")
        return due

    @step("moving due messages")
    def _move_due(self, store: Store) -> tuple[int | None, int]:
        now, messages = self.driver.now(), store.machinery_messages
        late: Document = {"status": Status.DELAYED}

        def next_due() -> int | None:
            first = messages.find_one(late, {"due_at": 1}, sort=[("due_at", 1)])
            return None if first is None else int(first["due_at"])

        due = next_due()
        if due is None or due > now:
            return due, 0
        moved = messages.update_many(
            {**late, "due_at": {"$lte": now}, "tenant": None}, {"$set": {"status": Status.WAITING}}
        ).modified_count
        due = next_due()
        if due is not None and due <= now:
            moved += promote_fair(store, now)
            due = next_due()
        return due, moved

    def look_at_sessions(self) -> None:
        """Give back what dead consumers held."""
        now = self.driver.clock.monotonic()
        asks_holders = now >= self._next_holders
        if asks_holders:
            self._next_holders = now + self.lease
        holders, sessions = self._sessions(asks_holders)
        beats = {session: int(one["beats"]) for session, one in sessions.items()}
        ended = [
            session
            for session, one in sessions.items()
            if (info := read_record(one["info"])) is not None and has_ended(info)
        ]
        silent = self._judge.dead(beats, now)
        for session in dict.fromkeys((*ended, *silent)):
            # Only if it has not beaten since it was seen.
            if self._forget_session(session, beats[session]):
                log_loss(read_record(sessions[session]["info"]), has_ended=session in ended)
                self._give_back(session)
        for session in holders:
            if session and session not in sessions:
                # It claimed after it was given up, or who gave it up died before giving all back.
                self._give_back(session)

    @step("looking after workers")
    def _sessions(self, store: Store, asks_holders: bool) -> tuple[list[str], dict[str, Document]]:
        """Return the sessions that hold messages, if asked for, and all sessions' documents."""
        # In this order: who holds something was registered before it claimed it.
        holds = {"status": {"$in": [Status.HELD, Status.TAKEN]}}
        holders = store.machinery_messages.distinct("session", holds) if asks_holders else []
        return list(holders), {one["_id"]: one for one in store.machinery_sessions.find()}

    @step("giving a worker up")
    def _forget_session(self, store: Store, session: str, beats: int) -> bool:
        seen: Document = {"_id": session, "beats": beats}
        return store.machinery_sessions.delete_one(seen).deleted_count > 0

    def _give_back(self, session: str) -> None:
        began = ran(host_folder(KIND), session)
        self.driver.run(
            lambda store: release(store, session, began),
            doing="giving a dead worker's messages back",
            away=BrokerUnavailable,
        )
        remove(host_folder(KIND), session)
        self.driver.notify("messages")

    # Looking

    def pending(self, queue: str, limit: int) -> list[Message]:
        self._promote()
        return self._find({"status": QUEUED, "queue": queue}, ORDER, limit)

    def delayed(self, limit: int) -> list[Message]:
        return self._find({"status": Status.DELAYED}, [("due_at", 1), ("order", 1)], limit)

    @step("counting messages")
    def waiting(self, store: Store, queue: str) -> int:
        return store.machinery_messages.count_documents({"status": QUEUED, "queue": queue})

    @step("listing messages")
    def _find(
        self, store: Store, query: Document, order: Sequence[tuple[str, int]], limit: int
    ) -> list[Message]:
        found = store.machinery_messages.find(query).sort(list(order)).limit(limit)
        return [message_of(one) for one in found]

    def stats(self) -> list[QueueStats]:
        self._promote()
        return self._count_messages()

    @step("counting messages")
    def _count_messages(self, store: Store) -> list[QueueStats]:
        def those(statuses: Sequence[Status], then: object, otherwise: object) -> Document:
            return {"$cond": [{"$in": ["$status", list(statuses)]}, then, otherwise]}

        # All in one command: a message that moves between two of them would be in neither.
        group = {
            "_id": "$queue",
            "waiting": {"$sum": those(WAITS, 1, 0)},
            "running": {"$sum": those((Status.HELD, Status.ENDING), 1, 0)},
            "delayed": {"$sum": those((Status.DELAYED,), 1, 0)},
            "dead": {"$sum": those((Status.DEAD,), 1, 0)},
            "oldest": {"$min": those(WAITS, "$sent_at", None)},
        }
        found = {one["_id"]: one for one in store.machinery_messages.aggregate([{"$group": group}])}
        stats: list[QueueStats] = []
        named = {one["_id"]: one for one in store.machinery_queues.find()}
        # Forgotten while another process, which does not name it again, was sending to it.
        unnamed: list[Document] = [{"_id": queue} for queue in sorted(found.keys() - named.keys())]
        if unnamed:
            insert_new(store.machinery_queues, unnamed)
        for one in (*named.values(), *unnamed):
            queue = found.get(one["_id"], {})
            since = queue.get("oldest")
            stats.append(
                QueueStats(
                    queue=one["_id"],
                    waiting=queue.get("waiting", 0),
                    running=queue.get("running", 0),
                    delayed=queue.get("delayed", 0),
                    dead=queue.get("dead", 0),
                    oldest_at=None if since is None else moment_of(since),
                    paused=bool(one.get("paused")),
                )
            )
        return sorted(stats, key=lambda one: one.queue)

    @step("listing workers")
    def workers(self, store: Store) -> list[WorkerInfo]:
        held: Document = {"$match": {"status": Status.HELD}}
        counted = store.machinery_messages.aggregate(
            [held, {"$group": {"_id": "$session", "count": {"$sum": 1}}}]
        )
        holding = {one["_id"]: one["count"] for one in counted}
        return [
            info.worker(
                one["_id"],
                beat_at=one["beat_at"],
                holding=holding.get(one["_id"], 0),
                stalled=bool(one.get("stalled")),
            )
            for one in store.machinery_sessions.find()
            if (info := read_record(one["info"])) is not None and not has_ended(info)
        ]

    @step("purging a queue")
    def purge(self, store: Store, queue: str) -> int:
        query = {"queue": queue, "status": {"$in": _PURGED}}
        return store.machinery_messages.delete_many(query).deleted_count

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        for some in pieces(self._purgeable(queue), lambda one: one[1], most=PURGE_STEP):
            ids = [id for id, _ in some]
            before(self._queued(ids))
            yield self._delete_queued(ids)

    @step("purging a queue")
    def _purgeable(self, store: Store, queue: str) -> list[tuple[str, int]]:
        """Return the ids of the messages that wait in a queue, and the sizes of their bodies."""
        # The bodies travel: a server before 4.4, and others with its protocol, tell no size.
        query = {"queue": queue, "status": {"$in": _PURGED}}
        found = store.machinery_messages.find(query, {"body": 1}).sort("order")
        return [(one["_id"], len(one["body"])) for one in found]

    @step("purging a queue")
    def _queued(self, store: Store, ids: Sequence[str]) -> list[Message]:
        query = {"_id": {"$in": ids}, "status": {"$in": _PURGED}}
        return [message_of(one) for one in store.machinery_messages.find(query).sort("order")]

    @step("purging a queue", again=False)
    def _delete_queued(self, store: Store, ids: Sequence[str]) -> list[Message]:
        query = {"status": {"$in": _PURGED}}
        found = (store.machinery_messages.find_one_and_delete({"_id": id, **query}) for id in ids)
        return [message_of(one) for one in found if one is not None]

    @step("forgetting a queue")
    def forget_queue(self, store: Store, queue: str) -> bool:
        if any(
            (info := read_record(one["info"])) is None or queue in info.queues
            for one in store.machinery_sessions.find()
        ):
            return False
        if store.machinery_messages.find_one({"queue": queue}, {"_id": 1}) is not None:
            return False
        self._named.discard(queue)
        store.machinery_queues.delete_one({"_id": queue, "paused": {"$ne": 1}})
        return store.machinery_queues.find_one({"_id": queue}, {"_id": 1}) is None

    @step("pausing a queue")
    def pause(self, store: Store, queue: str) -> None:
        store.machinery_queues.update_one({"_id": queue}, {"$set": {"paused": 1}}, upsert=True)
        # What is claimed after this sees the mark; see consumer.py.
        untake(store, {"queue": queue})

    def resume(self, queue: str) -> None:
        self._resume(queue)
        self.driver.notify("messages")

    @step("resuming a queue")
    def _resume(self, store: Store, queue: str) -> None:
        store.machinery_queues.update_one({"_id": queue}, {"$set": {"paused": 0}})

    @step("looking for paused queues")
    def paused(self, store: Store) -> frozenset[str]:
        return frozenset(one["_id"] for one in store.machinery_queues.find({"paused": 1}))

    @step("listing dead letters")
    def dead_letters(self, store: Store, *, limit: int, queue: str = "") -> list[DeadLetter]:
        query: Document = {"status": Status.DEAD, **({"queue": queue} if queue else {})}
        found = store.machinery_messages.find(query).sort([("died_at", -1), ("order", -1)])
        return [letter_of(one) for one in found.limit(limit)]

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        now = self.driver.now()
        there = msgspec.structs.replace(message, queue=queue, eta=None)
        [document] = documents_of([there], token="", first=self.driver.next_order(1), now=now)
        document |= {
            "status": Status.DEAD,
            "reason": reason,
            "error": printable(error),
            "died_at": now,
        }

        def write(store: Store) -> None:
            insert_new(store.machinery_queues, [{"_id": queue}])
            insert_new(store.machinery_messages, [document])

        self.driver.run(
            write, doing="burying a message", away=BrokerUnavailable, refused=PublishRefused
        )

    @step("taking dead letters", again=False)
    def take_dead(self, store: Store, ids: Sequence[str]) -> list[DeadLetter]:
        taken = (
            store.machinery_messages.find_one_and_delete({"_id": id, "status": Status.DEAD})
            for id in dict.fromkeys(ids)
        )
        return [letter_of(one) for one in taken if one is not None]

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        now = self.driver.now()
        until = now + int(ttl * 1e6)
        self._publish(
            lambda store: write_records(store, topic, records, now=now, until=until), again=False
        )
        self.driver.notify(NOTIFIER)

    def subscribe(self, topic: str, *, since: float = 0.0) -> MongoSubscription:
        return MongoSubscription(self.driver, topic, since)

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)
