"""Messages in MongoDB, a document each; what is in it stands in messages.py, the protocol in
docs/explanation/mongodb-protocol.md.

    machinery_messages    one for each message, until it is done
    machinery_queues      every queue that ever held something or had a consumer; `paused`
    machinery_sessions    a consumer that lives: who it is, and how often it has beaten
    machinery_tokens      a submission that was carried out, for ten minutes; its messages until they are all stored

A consumer that has not beaten for a lease, by the clock of who looks, is given up at the second look; one whose process on
this host has ended, at the first.

Limits: delayed messages go by the clock of the server as each process has measured it. On a server without transactions a
batch becomes visible message by message.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

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
from machinery_py.brokers.liveness import HeartbeatJudge, has_ended, read_record
from machinery_py.brokers.mongodb.consumer import KIND, ORDER, MongoConsumer
from machinery_py.brokers.mongodb.messages import (
    QUEUED,
    Status,
    documents_of,
    letter_of,
    message_of,
    release,
    untake,
)
from machinery_py.clock import moment_of
from machinery_py.connections.durability import Concern
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.mongodb.client import (
    Document,
    MongoDriver,
    Store,
    insert_new,
    printable,
)
from machinery_py.connections.session_files import host_folder, ran, remove
from machinery_py.errors import BrokerUnavailable, MachineryError, PublishRefused, PublishUnknown

LEASE = 10.0  # seconds without a beat until a consumer is given up
TOKEN_LIFE = 600 * 1_000_000  # µs; longer than anybody repeats a submission
SWEEP = 60.0  # seconds between two looks for old tokens

MESSAGES = "messages"  # a deed of a token, of messages alone

T = TypeVar("T")
_pack = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(list[Message]).decode


class MongoBroker(Broker):
    """Collections of the driver's database. The driver belongs to whoever made it."""

    features = BrokerFeatures(name="mongodb")

    def __init__(self, driver: MongoDriver, *, lease: float = LEASE) -> None:
        self.driver = driver
        self.lease = lease
        self._judge: HeartbeatJudge[str] = HeartbeatJudge(patience=lease, lease=lease)
        self._named: set[str] = set()
        self._busy: set[str] = set()  # tokens of calls that are at it
        self._putting = ForkLock()
        self._consumers: weakref.WeakSet[MongoConsumer] = weakref.WeakSet()
        self._next_sweep = self._next_holders = 0.0

    def _run(self, work: Callable[[Store], T], doing: str) -> T:
        return self.driver.run(work, doing=doing, away=BrokerUnavailable)

    # Publishing

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        if not token:
            self.store([("", messages)], again=False)
            return True
        return self.once(token, MESSAGES, _pack(messages), lambda: self.store([(token, messages)]))

    def once(self, token: str, kind: str, deed: bytes, carry_out: Callable[[], object]) -> bool:
        """Carry out a submission that bears this token, if that was not done before; whether it was not.

        The token and the deed are one document: from then on it will be carried out, by us or by a later `tend`.
        """
        now = self.driver.now()
        document: Document = {"_id": token, "at": now, "kind": kind, "deed": deed, "deed_at": now}

        def begin(store: Store) -> bool:
            if insert_new(store.machinery_tokens, [document])[0]:
                return True
            # Carried out before; or begun, by a call that lost a reply: this one does what is left.
            return (
                store.machinery_tokens.find_one({"_id": token, "deed_at": {"$gt": 0}}, {"_id": 1})
                is not None
            )

        with self._putting:
            if token in self._busy:
                return False
            self._busy.add(token)
        try:
            if not self.driver.run(
                begin,
                doing="publishing",
                away=BrokerUnavailable,
                lost=PublishUnknown,
                refused=PublishRefused,
            ):
                return False
            try:
                carry_out()
                self.forget_deed(token)
            except MachineryError as error:
                raise PublishUnknown(
                    f"{error} (it was accepted, and is carried out by the next worker that looks)"
                ) from error
        finally:
            self._busy.discard(token)
        return True

    def forget_deed(self, token: str) -> None:
        self.driver.run(
            lambda store: store.machinery_tokens.update_one(
                {"_id": token}, {"$set": {"deed": b"", "deed_at": 0}}
            ),
            doing="publishing",
            away=PublishUnknown,
        )

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
            insert_new(store.machinery_messages, documents)

        if again:  # a part of what is accepted
            self.driver.run(write, doing="publishing", away=PublishUnknown)
        else:
            self.driver.run(
                write,
                doing="publishing",
                away=BrokerUnavailable,
                again=False,
                lost=PublishUnknown,
                refused=PublishRefused,
            )
        self._named |= queues
        self.driver.notify("messages")

    def consume(self, queues: Sequence[str], *, worker: str) -> MongoConsumer:
        consumer = MongoConsumer(self.driver, tuple(queues), worker=worker)
        self._consumers.add(consumer)
        return consumer

    # House-keeping

    def tend(self) -> float:
        self.look_at_sessions()
        for token, kind, deed in self.old_deeds():
            if kind == MESSAGES:  # else it is for a store that can write states
                self.finish_put(token, deed)
        return self.tend_messages()

    def finish_put(self, token: str, deed: bytes) -> None:
        """Carry out what was put by somebody who died over it."""
        self.store([(token, _messages(deed))])
        self.forget_deed(token)

    def tend_messages(self) -> float:
        """Bring what is due to its queues, forget old tokens; as `tend`."""
        monotonic = self.driver.clock.monotonic()
        if monotonic >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP
            before = self.driver.now() - TOKEN_LIFE
            old: Document = {"at": {"$lt": before}, "deed_at": 0}
            self._run(
                lambda store: store.machinery_tokens.delete_many(old), "looking for old tokens"
            )
        due = self._promote()
        interval = self.lease / 4
        return interval if due is None else min(interval, max(0.0, (due - self.driver.now()) / 1e6))

    def old_deeds(self) -> list[tuple[str, str, bytes]]:
        """Token, kind and deed of submissions that were begun and not carried out."""
        query = {"deed_at": {"$gt": 0, "$lt": self.driver.now() - int(self.driver.deed_age * 1e6)}}
        return self._run(
            lambda store: [
                (one["_id"], one["kind"], bytes(one["deed"]))
                for one in store.machinery_tokens.find(query).limit(100)
            ],
            "looking for what is unfinished",
        )

    def _promote(self) -> int | None:
        """Delayed messages that are due go to their queues; returns the moment at which the next one is."""
        now = self.driver.now()
        late: Document = {"status": int(Status.DELAYED)}

        def promote(store: Store) -> tuple[int | None, int]:
            messages = store.machinery_messages
            first = messages.find_one(late, {"due_at": 1}, sort=[("due_at", 1)])
            if first is None or first["due_at"] > now:
                return (None if first is None else first["due_at"]), 0
            moved = messages.update_many(
                {**late, "due_at": {"$lte": now}}, {"$set": {"status": int(Status.WAITING)}}
            )
            first = messages.find_one(late, {"due_at": 1}, sort=[("due_at", 1)])
            return (None if first is None else first["due_at"]), moved.modified_count

        due, moved = self._run(promote, "moving due messages")
        if moved:
            self.driver.notify("messages")
        return due

    def look_at_sessions(self) -> None:
        """Give up who has not beaten, or whose process has ended, and give back what it held."""
        now = self.driver.clock.monotonic()
        asks_holders = now >= self._next_holders
        if asks_holders:
            self._next_holders = now + self.lease

        def look(store: Store) -> tuple[list[str], dict[str, Document]]:
            # In this order: who holds something was registered before it claimed it.
            holds = {"status": {"$in": [int(Status.HELD), int(Status.TAKEN)]}}
            holders = store.machinery_messages.distinct("session", holds) if asks_holders else []
            return list(holders), {one["_id"]: one for one in store.machinery_sessions.find()}

        holders, sessions = self._run(look, "looking after workers")
        beats = {session: int(one["beats"]) for session, one in sessions.items()}
        ended = [
            session
            for session, one in sessions.items()
            if (info := read_record(one["info"])) is not None and has_ended(info)
        ]
        silent = self._judge.dead(beats, now)
        for session in dict.fromkeys((*ended, *silent)):
            self._condemn(session, beats[session])
        for session in holders:
            if session and session not in sessions:
                # It claimed after it was given up, or who gave it up died over it.
                self._give_back(session)

    def _condemn(self, session: str, beats: int) -> None:
        """Give a session up, if it has not beaten since it was seen."""
        seen: Document = {"_id": session, "beats": beats}
        gone = self._run(
            lambda store: store.machinery_sessions.delete_one(seen).deleted_count,
            "giving a worker up",
        )
        if gone:
            self._give_back(session)

    def _give_back(self, session: str) -> None:
        began = ran(host_folder(KIND), session)
        self._run(
            lambda store: release(store, session, began), "giving a dead worker's messages back"
        )
        remove(host_folder(KIND), session)
        self.driver.notify("messages")

    # Looking

    def pending(self, queue: str, limit: int) -> list[Message]:
        self._promote()
        query = {"status": QUEUED, "queue": queue}
        return self._run(
            lambda store: [
                message_of(one)
                for one in store.machinery_messages.find(query).sort(ORDER).limit(limit)
            ],
            "listing a queue",
        )

    def delayed(self, limit: int) -> list[Message]:
        query = {"status": int(Status.DELAYED)}
        order = [("due_at", 1), ("order", 1)]
        return self._run(
            lambda store: [
                message_of(one)
                for one in store.machinery_messages.find(query).sort(order).limit(limit)
            ],
            "listing delayed messages",
        )

    def stats(self) -> list[QueueStats]:
        self._promote()

        def count(store: Store, *statuses: Status) -> dict[str, tuple[int, int]]:
            found = store.machinery_messages.aggregate(
                [
                    {"$match": {"status": {"$in": [int(status) for status in statuses]}}},
                    {
                        "$group": {
                            "_id": "$queue",
                            "count": {"$sum": 1},
                            "oldest": {"$min": "$sent_at"},
                        }
                    },
                ]
            )
            return {one["_id"]: (one["count"], one["oldest"]) for one in found}

        def look(store: Store) -> list[QueueStats]:
            waiting, running = (
                count(store, Status.WAITING, Status.TAKEN),
                count(store, Status.HELD, Status.ENDING),
            )
            delayed, dead = count(store, Status.DELAYED), count(store, Status.DEAD)
            none = (0, 0)
            return [
                QueueStats(
                    queue=queue,
                    waiting=waiting.get(queue, none)[0],
                    running=running.get(queue, none)[0],
                    delayed=delayed.get(queue, none)[0],
                    dead=dead.get(queue, none)[0],
                    oldest_at=moment_of(waiting[queue][1]) if queue in waiting else None,
                    paused=paused,
                )
                for queue, paused in sorted(
                    (one["_id"], bool(one.get("paused"))) for one in store.machinery_queues.find()
                )
            ]

        return self._run(look, "counting messages")

    def workers(self) -> list[WorkerInfo]:
        def look(store: Store) -> tuple[list[Document], dict[str, int]]:
            held = store.machinery_messages.aggregate(
                [
                    {"$match": {"status": int(Status.HELD)}},
                    {"$group": {"_id": "$session", "count": {"$sum": 1}}},
                ]
            )
            return list(store.machinery_sessions.find()), {one["_id"]: one["count"] for one in held}

        sessions, holding = self._run(look, "listing workers")
        return [
            info.worker(one["_id"], beat_at=one["beat_at"], holding=holding.get(one["_id"], 0))
            for one in sessions
            if (info := read_record(one["info"])) is not None and not has_ended(info)
        ]

    def purge(self, queue: str) -> int:
        query = {
            "queue": queue,
            "status": {"$in": [int(Status.WAITING), int(Status.TAKEN), int(Status.DELAYED)]},
        }
        return self._run(
            lambda store: store.machinery_messages.delete_many(query).deleted_count,
            "purging a queue",
        )

    def pause(self, queue: str) -> None:
        def pause(store: Store) -> None:
            store.machinery_queues.update_one({"_id": queue}, {"$set": {"paused": 1}}, upsert=True)
            untake(
                store, {"queue": queue}
            )  # what is claimed after this sees the mark; see consumer.py

        self._run(pause, "pausing a queue")

    def resume(self, queue: str) -> None:
        self._run(
            lambda store: store.machinery_queues.update_one(
                {"_id": queue}, {"$set": {"paused": 0}}
            ),
            "resuming a queue",
        )
        self.driver.notify("messages")

    def paused(self) -> frozenset[str]:
        return self._run(
            lambda store: frozenset(
                one["_id"] for one in store.machinery_queues.find({"paused": 1})
            ),
            "looking for paused queues",
        )

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        query: Document = {"status": int(Status.DEAD), **({"queue": queue} if queue else {})}
        order = [("died_at", -1), ("order", -1)]
        return self._run(
            lambda store: [
                letter_of(one)
                for one in store.machinery_messages.find(query).sort(order).limit(limit)
            ],
            "listing dead letters",
        )

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        now = self.driver.now()
        there = msgspec.structs.replace(message, queue=queue, eta=None)
        [document] = documents_of([there], token="", first=self.driver.next_order(1), now=now)
        document |= {
            "status": int(Status.DEAD),
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

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        def take(store: Store) -> list[DeadLetter]:
            taken = (
                store.machinery_messages.find_one_and_delete(
                    {"_id": id, "status": int(Status.DEAD)}
                )
                for id in dict.fromkeys(ids)
            )
            return [letter_of(one) for one in taken if one is not None]

        return self.driver.run(
            take, doing="taking dead letters", away=BrokerUnavailable, again=False
        )

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)
