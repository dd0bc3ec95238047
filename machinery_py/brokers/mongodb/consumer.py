"""A consumer of MongoDB queues: it claims, disposes, beats and sleeps. The protocol: docs/explanation/mongodb-protocol.md.

A claim reads the ids of what waits, writes its lease into those that still wait (they are TAKEN), makes sure that the queue is
not paused, and holds what is still taken. `pause` first marks the queue and then undoes what is taken: so a claim that is
behind the second step sees the mark, and one that is ahead of it holds before, or finds nothing taken any more.

Asleep, a consumer looks again ever more rarely; what this process publishes wakes it at once. At a queue that it knows to be
paused it looks for the mark alone.

Limits: what another process publishes is noticed at the next look: at a tenth of the time since the last message, 10 ms to
half a second.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Sequence

from pymongo import DeleteOne, ReturnDocument

from machinery_py.brokers.base import WAITING, Consumer, Delivery, Disposal, Fate
from machinery_py.brokers.liveness import own_record
from machinery_py.brokers.mongodb.messages import (
    FREE,
    Receipt,
    Status,
    delivery_of,
    held,
    mark_of,
    paused_of,
    release,
    untake,
)
from machinery_py.clock import micros
from machinery_py.connections.mongodb.client import (
    Document,
    MongoDriver,
    Store,
    insert_new,
    printable,
)
from machinery_py.connections.session_files import host_file
from machinery_py.errors import BrokerUnavailable, MachineryError

SOONEST, LATEST = 0.01, 0.5  # seconds between two looks
LOST_LIFE = 30.0  # seconds that a claim without a reply is asked for
TRIES = 5  # claims in a row that rivals may spoil
KIND = "mongodb"  # of the files that say what consumers run
ORDER = [("priority", -1), ("order", 1)]


class MongoConsumer(Consumer):
    """A session: a document, and the leases that bear its name."""

    session = ""

    def __init__(self, driver: MongoDriver, queues: tuple[str, ...], *, worker: str) -> None:
        self._driver = driver
        self._queues = tuple(dict.fromkeys(queues))
        self._worker = printable(worker)
        self._notifier = driver.notifier("messages")
        self._claims = itertools.count(1)
        self._lost: list[tuple[str, float]] = []  # leases of claims that had no reply
        self._shut: set[str] = set()  # queues that were paused at the last look
        self._woken = False
        self._closed = False
        self._pid = os.getpid()
        self._active_at = self._looked_at = time.monotonic()
        self._starting = threading.Lock()
        self._ending = threading.Lock()
        self._start_session()

    def _start_session(self) -> None:
        file = host_file(KIND)
        session = file.key
        document: Document = {
            "_id": session,
            "info": own_record(self._worker, self._queues, self._driver.clock),
            "beats": 0,
            "beat_at": self._driver.now(),
        }

        def register(store: Store) -> None:
            insert_new(store.machinery_queues, [{"_id": queue} for queue in self._queues])
            insert_new(store.machinery_sessions, [document])

        self._driver.run(register, doing="registering a worker", away=BrokerUnavailable)
        self.session, self._file = session, file

    # Claiming

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deadline = time.monotonic() + timeout
        # Who comes back with nothing in hand looks no sooner than if it had gone on sleeping.
        look_at = self._next_look() if timeout > 0 else 0.0
        deliveries: list[Delivery] = []
        while True:
            now = time.monotonic()
            if now < look_at and not self._woken and not self._closed:
                notified = self._notifier.wait(min(look_at, deadline) - now)
                if not notified and not self._woken and time.monotonic() < look_at:
                    break
            if self._closed:
                break
            deliveries = self._claim(limit, order or self._queues)
            self._looked_at = time.monotonic()
            if deliveries or self._woken or self._looked_at >= deadline:
                break
            look_at = self._next_look()
        if deliveries:
            self._active_at = self._looked_at
        self._woken = False
        return deliveries

    def _next_look(self) -> float:
        return self._looked_at + max(SOONEST, min(LATEST, (self._looked_at - self._active_at) / 10))

    def _claim(self, limit: int, queues: Sequence[str]) -> list[Delivery]:
        lease = f"{self.session}.{next(self._claims)}"
        now = time.monotonic()
        lost = [name for name, at in self._lost if now - at < LOST_LIFE]

        def claim(store: Store) -> list[Document]:
            found = self._regain(store, lost, lease) if lost else []
            if self._shut:
                self._shut = paused_of(store, self._queues)
            open_queues = [queue for queue in queues if queue not in self._shut]
            if len(open_queues) > 1 and not found and not self._anything(store, open_queues):
                return []
            for queue in open_queues:
                if len(found) < limit:
                    found += self._claim_from(store, queue, limit - len(found), lease)
            return found

        try:
            found = self._driver.run(
                claim, doing="claiming messages", away=BrokerUnavailable, again=False
            )
        except MachineryError:
            self._lost = [*((name, at) for name, at in self._lost if name in lost), (lease, now)]
            raise
        # Asked for as long as a late packet of theirs may still be carried out.
        self._lost = [one for one in self._lost if one[0] in lost]
        return [delivery_of(document) for document in found]

    def _anything(self, store: Store, queues: Sequence[str]) -> bool:
        waits = {"status": int(Status.WAITING), "queue": {"$in": list(queues)}}
        return store.machinery_messages.find_one(waits, {"_id": 1}) is not None

    def _regain(self, store: Store, lost: Sequence[str], lease: str) -> list[Document]:
        """Take back and return the messages of claims that had no reply: they are ours, and nobody knows of them."""
        untake(store, {"lease": {"$in": list(lost)}})
        store.machinery_messages.update_many(
            {"lease": {"$in": list(lost)}, "status": int(Status.HELD)}, {"$set": {"lease": lease}}
        )
        return list(
            store.machinery_messages.find({"lease": lease, "status": int(Status.HELD)}).sort(ORDER)
        )

    def _claim_from(self, store: Store, queue: str, limit: int, lease: str) -> list[Document]:
        messages = store.machinery_messages
        taken: Document = {"queue": queue, "lease": lease, "status": int(Status.TAKEN)}
        if not self._take(store, queue, limit, lease):
            return []
        if paused_of(store, [queue]):
            self._shut.add(queue)
            untake(store, {"queue": queue, "lease": lease})
            return []
        hold: Document = {"$set": {"status": int(Status.HELD)}, "$inc": {"fence": 1}}
        if limit == 1:
            one = messages.find_one_and_update(taken, hold, return_document=ReturnDocument.AFTER)
            return [] if one is None else [one]
        if not messages.update_many(taken, hold).matched_count:
            return []
        # With a batch as large as that, nothing is left to be asked for in a second command.
        return list(
            messages.find({**taken, "status": int(Status.HELD)}).sort(ORDER).batch_size(limit + 1)
        )

    def _take(self, store: Store, queue: str, limit: int, lease: str) -> bool:
        """The first step of a claim; whether it has taken anything."""
        waits: Document = {"status": int(Status.WAITING), "queue": queue}
        mine: Document = {
            "$set": {
                "status": int(Status.TAKEN),
                "lease": lease,
                "session": self.session,
                "begun": 0,
            }
        }
        messages = store.machinery_messages
        if limit == 1:
            return messages.find_one_and_update(waits, mine, {"_id": 1}, sort=ORDER) is not None
        for _ in range(TRIES):
            ids = [
                one["_id"]
                for one in messages.find(waits, {"_id": 1})
                .sort(ORDER)
                .limit(limit)
                .batch_size(limit)
            ]
            if not ids:
                return False
            if messages.update_many(
                {"_id": {"$in": ids}, "status": int(Status.WAITING)}, mine
            ).matched_count:
                return True
        return False

    # Ending deliveries

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        if not disposals:
            return []
        with self._ending:
            ours = self._ours([one.delivery for one in disposals])
            first: set[str] = set()
            done: list[Disposal] = []
            verdicts: list[bool] = []
            for one in disposals:
                id = _id(one.delivery)
                mine = id in ours and id not in first and ours[id] == one.delivery.receipt.lease
                verdicts.append(mine)
                if mine:
                    first.add(id)
                    if one.fate is Fate.DONE:
                        done.append(one)
            gone = self._delete([one.delivery for one in done])
            for index, one in enumerate(disposals):
                if verdicts[index]:
                    verdicts[index] = (
                        _id(one.delivery) in gone if one.fate is Fate.DONE else self._end(one)
                    )
        if any(one.fate is not Fate.DONE for one in disposals):
            self._driver.notify("messages")
        return verdicts

    def _delete(self, deliveries: Sequence[Delivery]) -> set[str]:
        """Delete what is still ours, and return it. Only who holds a message deletes it, so what is gone was ours."""
        writes = [DeleteOne(held(delivery)) for delivery in deliveries]
        ids = {_id(delivery) for delivery in deliveries}

        def delete(store: Store) -> set[str]:
            if store.machinery_messages.bulk_write(writes, ordered=False).deleted_count == len(
                writes
            ):
                return ids
            left = store.machinery_messages.find({"_id": {"$in": list(ids)}}, {"_id": 1})
            return ids - {one["_id"] for one in left}

        return (
            self._driver.run(delete, doing="ending deliveries", away=BrokerUnavailable)
            if writes
            else set()
        )

    def _end(self, disposal: Disposal) -> bool:
        fields = update_at_end(disposal, self._driver.now())
        return self._driver.run(
            lambda store: (
                store.machinery_messages.update_one(held(disposal.delivery), fields).matched_count
                > 0
            ),
            doing="ending deliveries",
            away=BrokerUnavailable,
            again=False,
        )

    def _ours(self, deliveries: Iterable[Delivery]) -> dict[str, str]:
        """id → lease of those that this session holds."""
        ids = [_id(delivery) for delivery in deliveries]
        query = {"_id": {"$in": ids}, "session": self.session, "status": int(Status.HELD)}
        return (
            self._driver.run(
                lambda store: {
                    one["_id"]: one["lease"]
                    for one in store.machinery_messages.find(query, {"lease": 1})
                },
                doing="looking at deliveries",
                away=BrokerUnavailable,
            )
            if ids
            else {}
        )

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        ours = self._ours(deliveries)
        return [ours.get(_id(delivery)) == delivery.receipt.lease for delivery in deliveries]

    def run_begins(self, delivery: Delivery) -> None:
        self._file.begins(mark_of(_id(delivery)))
        if not delivery.redelivered:
            return
        # As in Redis: what the last worker may have died of counts from now on wherever this one dies.
        try:
            self._driver.run(
                lambda store: store.machinery_messages.update_one(
                    held(delivery), {"$set": {"begun": 1}}
                ),
                doing="beginning a task that came back",
                away=BrokerUnavailable,
            )
        except MachineryError:
            return  # if it kills this worker now, the next death counts

    def run_ends(self, delivery: Delivery) -> None:
        self._file.ends(mark_of(_id(delivery)))

    # Living

    def beat(self) -> bool:
        if self._closed:
            return True
        with self._starting:
            self._file.touch()
            beat: Document = {"$inc": {"beats": 1}, "$set": {"beat_at": self._driver.now()}}
            alive = self._driver.run(
                lambda store: (
                    store.machinery_sessions.update_one({"_id": self.session}, beat).matched_count
                    > 0
                ),
                doing="beating",
                away=BrokerUnavailable,
            )
            if alive:
                return True
            before = self.session
            self._file.end()
            self._start_session()
            # It may have claimed something after it was given up; the others would find that at their next look.
            self._driver.run(
                lambda store: release(store, before, ()),
                doing="giving messages back",
                away=BrokerUnavailable,
            )
            return False

    def wake(self) -> None:
        self._woken = True
        self._notifier.notify()

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._notifier.notify()

        def leave(store: Store) -> None:
            store.machinery_sessions.delete_one({"_id": self.session})
            release(store, self.session, ())

        self._driver.run(leave, doing="giving messages back", away=BrokerUnavailable)
        self._file.end()
        self._driver.notify("messages")


def update_at_end(disposal: Disposal, now: int, **more: object) -> Document:
    """The update of a message that is not done: where it goes from here. `more`: fields that are set besides."""
    parked = disposal.fate is Fate.LATER and disposal.reason != WAITING
    return {
        "$set": {**_fields_at_end(disposal, now), **more},
        **({"$inc": {"parks": 1}} if parked else {}),
    }


def _fields_at_end(disposal: Disposal, now: int) -> Document:
    match disposal.fate:
        case Fate.BACK | Fate.DONE:
            return {**FREE, "status": int(Status.WAITING)}
        case Fate.LATER:
            due_at = 0 if disposal.eta is None else micros(disposal.eta)
            return {
                **FREE,
                "status": int(Status.DELAYED if due_at > now else Status.WAITING),
                "due_at": due_at,
            }
        case Fate.DEAD:
            facts = {
                "uuid": disposal.uuid,
                "name": disposal.name,
                "reason": disposal.reason,
                "error": disposal.error,
            }
            said = {key: printable(value) for key, value in facts.items() if value}
            return {**FREE, "status": int(Status.DEAD), "died_at": now, **said}


def _id(delivery: Delivery) -> str:
    return delivery.receipt.id if isinstance(delivery.receipt, Receipt) else ""
