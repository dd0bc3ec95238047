"""Consumer of MongoDB queues: claims, disposals, heartbeats and waiting.

A claim reads the ids of what waits, writes its lease into those that still wait (they are TAKEN),
makes sure that the queue is not paused, and holds what is still taken. `pause` first marks the
queue and then undoes what is taken. So a claim behind the second step sees the mark, and one ahead
of it holds before, or finds nothing taken any more.

While it waits, a consumer looks ever more rarely; what this process publishes wakes it at once. At
a queue that it knows to be paused it looks for the mark alone.

Limits: what another process publishes is noticed at the next look: after a tenth of the time since
the last message, 10 ms to half a second.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from pymongo import DeleteOne, ReturnDocument

from machinery_py.bounds import ClaimLimit
from machinery_py.brokers.base import WAITING, Consumer, Delivery, DeliveryEnd, Disposal, Fate
from machinery_py.brokers.liveness import own_record, with_queues
from machinery_py.brokers.mongodb.messages import (
    FREE,
    HEAD,
    Status,
    delivery_of,
    held,
    paused_of,
    receipt_of,
    release,
    run_of,
    untake,
)
from machinery_py.brokers.mongodb.turns import FAIR
from machinery_py.clock import micros
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    insert_new,
    step,
)
from machinery_py.connections.mongodb.fences import next_fence
from machinery_py.connections.session_files import host_file
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.fences import Fence
from machinery_py.texts import printable

SOONEST, LATEST = 0.01, 0.5  # seconds between two looks
LOST_LIFE = 30.0  # seconds that a claim without a reply is asked for
TRIES = 5  # claims in a row that rivals may spoil
KIND = "mongodb"  # of the files that say what consumers run
ORDER = [("priority", -1), ("order", 1)]
_Claimed = tuple[Document, Fence]
OTHERS: Document = {"order": {"$gte": 0}}  # than those that have waited as WAITING


class MongoConsumer(DriverUser, Consumer):
    """A session: a document, and the leases that bear its name."""

    unavailable: ClassVar[type[MachineryError]] = BrokerUnavailable

    def __init__(
        self,
        driver: MongoDriver,
        queues: tuple[str, ...],
        *,
        worker: str,
        promote: Callable[[], int | None],
    ) -> None:
        """`promote`: moves what is due to its queues, and says when (µs) the next one is due."""
        super().__init__(driver)
        self._promote = promote
        self._due_at = math.inf  # monotonic second of the next delayed message
        self._queues = tuple(dict.fromkeys(queues))
        self._worker = printable(worker)
        self._notifier = driver.notifier("messages")
        self._claims = 0
        self._limit = ClaimLimit()
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
        self._record = own_record(self._worker, self._queues, self.driver.clock)
        document: Document = {
            "_id": file.key,
            "info": self._record,
            "beats": 0,
            "beat_at": self.driver.now(),
        }
        try:
            self._register(document)
        except BaseException:
            file.end()
            raise
        self.session: str = file.key
        self._file = file

    @step("registering a worker")
    def _register(self, store: Store, document: Document) -> None:
        insert_new(store.machinery_queues, [{"_id": queue} for queue in self._queues])
        insert_new(store.machinery_sessions, [document])

    # Claiming

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deadline = time.monotonic() + timeout
        # A call that follows one without deliveries looks no sooner than that one would have.
        look_at = self._next_look() if timeout > 0 else 0.0
        deliveries: list[Delivery] = []
        while True:
            now = time.monotonic()
            if now < look_at and not self._woken and not self._closed:
                notified = self._notifier.wait(min(look_at, deadline) - now)
                self._notifier.clear()
                if not notified and not self._woken and time.monotonic() < look_at:
                    break
            if self._closed:
                break
            served = self._queues
            claimed = [queue for queue in order if queue in served] or served
            deliveries = self._claim(limit, claimed)
            self._looked_at = time.monotonic()
            if deliveries or self._woken or self._looked_at >= deadline:
                break
            due = self._promote()  # what it moves sets the notifier
            until = math.inf if due is None else (due - self.driver.now()) / 1e6
            self._due_at = self._looked_at + until
            look_at = self._next_look()
        if deliveries:
            self._active_at = self._looked_at
        self._woken = False
        return deliveries

    def _next_look(self) -> float:
        pause = min(LATEST, (self._looked_at - self._active_at) / 10)
        return self._looked_at + max(SOONEST, min(pause, self._due_at - self._looked_at))

    def _claim(self, limit: int, queues: Sequence[str]) -> list[Delivery]:
        self._claims += 1
        limit = self._limit.of(limit)
        lease = f"{self.session}.{self._claims}"
        now = time.monotonic()
        lost = [name for name, at in self._lost if now - at < LOST_LIFE]
        try:
            found = self._claim_all(limit, queues, lease, lost)
        except MachineryError:
            self._limit.failed(limit)
            self._lost = [*((name, at) for name, at in self._lost if name in lost), (lease, now)]
            raise
        # Asked for as long as a late packet of theirs may still be carried out.
        self._lost = [one for one in self._lost if one[0] in lost]
        self._limit.took(len(document["body"]) for document, _ in found)
        return [delivery_of(document, fence) for document, fence in found]

    @step("claiming messages", again=False)
    def _claim_all(
        self, store: Store, limit: int, queues: Sequence[str], lease: str, lost: Sequence[str]
    ) -> list[_Claimed]:
        found = self._regain(store, lost, lease, limit) if lost else []
        if self._shut:
            self._shut = paused_of(store, self._queues)
        open_queues = [queue for queue in queues if queue not in self._shut]
        if len(open_queues) > 1 and not found:
            waits = {"status": Status.WAITING, "queue": {"$in": open_queues}}
            if store.machinery_messages.find_one(waits, {"_id": 1}) is None:
                return []
        for queue in open_queues:
            if len(found) < limit:
                found += self._claim_from(store, queue, limit - len(found), lease)
        return found

    def _regain(self, store: Store, lost: Sequence[str], lease: str, limit: int) -> list[_Claimed]:
        """Return messages of claims that had no reply, under a new lease: they are ours."""
        theirs: Document = {"lease": {"$in": list(lost)}}
        held: Document = {"status": Status.HELD}
        untake(store, theirs)
        messages = store.machinery_messages
        found = messages.find({**theirs, **held}, {"_id": 1})
        ids = [one["_id"] for one in found.sort(ORDER).limit(limit)]
        if not ids:
            return []
        these: Document = {"_id": {"$in": ids}, **theirs, **held}
        messages.update_many(these, {"$set": {"lease": lease}})
        fence = next_fence(store, self.driver.now(), len(ids))
        return _numbered(messages.find({"lease": lease, **held}).sort(ORDER), fence)

    def _claim_from(self, store: Store, queue: str, limit: int, lease: str) -> list[_Claimed]:
        messages = store.machinery_messages
        taken: Document = {"queue": queue, "lease": lease, "status": Status.TAKEN}
        if not self._take(store, queue, limit, lease):
            return []
        if paused_of(store, [queue]):
            self._shut.add(queue)
            untake(store, {"queue": queue, "lease": lease})
            return []
        # Between two steps that only the holder can make: an earlier one has its fence by now, and
        # a later one asks later. Also the claim of a worker that is stopped here finds nothing.
        fence = next_fence(store, self.driver.now(), limit)
        hold: Document = {"$set": {"status": Status.HELD}, "$inc": {"fence": 1}}
        if limit == 1:
            one = messages.find_one_and_update(taken, hold, return_document=ReturnDocument.AFTER)
            return [] if one is None else [(one, fence)]
        if not messages.update_many(taken, hold).matched_count:
            return []
        # With a batch as large as that, nothing is left to be asked for in a second command.
        held = messages.find({**taken, "status": Status.HELD})
        return _numbered(held.sort(ORDER).batch_size(limit + 1), fence)

    def _take(self, store: Store, queue: str, limit: int, lease: str) -> bool:
        """Do the first step of a claim; return whether it has taken anything."""
        waits: Document = {"status": Status.WAITING, "queue": queue}
        taken = {"status": Status.TAKEN, "lease": lease, "session": self.session, "begun": 0}
        mine: Document = {"$set": taken}
        messages = store.machinery_messages
        if limit == 1:
            return self._take_one(store, waits, mine)
        for _ in range(TRIES):
            ids = self._next_ids(store, waits, limit)
            if not ids:
                return False
            these = {"_id": {"$in": ids}, "status": Status.WAITING}
            if messages.update_many(these, mine).matched_count:
                return True
        return False

    # Of those that have waited for their turn, more may come back than can ever be asked. So half
    # of a claim is left to the others while there are some.

    def _share(self, limit: int) -> int:
        """Return how many of a claim are left to those that wait for no turn."""
        return limit - (limit + self._claims % 2) // 2

    def _take_one(self, store: Store, waits: Document, mine: Document) -> bool:
        messages = store.machinery_messages
        one = messages.find_one_and_update(waits, mine, {"order": 1}, sort=ORDER)
        if one is not None and one["order"] < 0 and self._share(1):
            other = messages.find_one_and_update({**waits, **OTHERS}, mine, {"_id": 1}, sort=ORDER)
            if other is not None:
                untake(store, {"_id": one["_id"], **mine["$set"]})
        return one is not None

    def _next_ids(self, store: Store, waits: Document, limit: int) -> list[str]:
        def find(which: Document, most: int) -> list[Document]:
            found = store.machinery_messages.find(which, {"order": 1})
            return list(found.sort(ORDER).limit(most).batch_size(most))

        found = find(waits, limit)
        if len(found) == limit and found[-1]["order"] < 0:
            found = [*find({**waits, **OTHERS}, self._share(limit)), *found]
        return list(dict.fromkeys(one["_id"] for one in found))[:limit]

    def serve(self, queues: Sequence[str]) -> None:
        queues = tuple(dict.fromkeys(queues))
        with self._starting:
            record = with_queues(self._record, queues)
            self._note_queues(queues, record)
            self._queues, self._record = queues, record
        self.wake()

    @step("changing a worker's queues")
    def _note_queues(self, store: Store, queues: Sequence[str], record: bytes) -> None:
        insert_new(store.machinery_queues, [{"_id": queue} for queue in queues])
        mine = {"_id": self.session}
        store.machinery_sessions.update_one(mine, {"$set": {"info": record}})

    # Ending deliveries

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        if not disposals:
            return []
        with self._ending:
            ours = self._ours([one.delivery for one in disposals])
            verdicts: list[bool] = []
            for one in disposals:
                name = _name(one.delivery)
                verdicts.append(name in ours)
                ours.discard(name)  # a delivery ends once
            mine = [one for one, is_ours in zip(disposals, verdicts, strict=True) if is_ours]
            done = [one.delivery for one in mine if one.fate is Fate.DONE]
            gone = self._delete(done) if done else set()
            for index, one in enumerate(disposals):
                if verdicts[index]:
                    verdicts[index] = (
                        _name(one.delivery)[0] in gone if one.fate is Fate.DONE else self._end(one)
                    )
        if any(one.fate is not Fate.DONE for one in disposals):
            self.driver.notify("messages")
        return verdicts

    @step("ending deliveries")
    def _delete(self, store: Store, deliveries: Sequence[Delivery]) -> set[str]:
        """Delete what is still ours, and return its ids.

        Only the holder of a message deletes it, so what is gone was ours.
        """
        messages = store.machinery_messages
        writes = [DeleteOne(held(delivery)) for delivery in deliveries]
        ids = {_name(delivery)[0] for delivery in deliveries}
        if messages.bulk_write(writes, ordered=False).deleted_count == len(writes):
            return ids
        return ids - {one["_id"] for one in messages.find({"_id": {"$in": list(ids)}}, {"_id": 1})}

    @step("ending deliveries", again=False)
    def _end(self, store: Store, disposal: Disposal) -> bool:
        update = update_at_end(disposal, self.driver.now())
        if disposal.fate is Fate.LATER:
            later = update["$set"]
            if receipt_of(disposal.delivery).order >= FAIR:
                later["status"] = Status.DELAYED  # it gets its next turn when it is due
            elif disposal.reason == WAITING:
                later["order"] = later["due_at"] - HEAD
        return (
            store.machinery_messages.update_one(held(disposal.delivery), update).matched_count > 0
        )

    def _ours(self, deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
        """Return (id, lease) of those that this session holds."""
        return self._held([_name(delivery)[0] for delivery in deliveries]) if deliveries else set()

    @step("looking at deliveries")
    def _held(self, store: Store, ids: Sequence[str]) -> set[tuple[str, str]]:
        query = {"_id": {"$in": ids}, "session": self.session, "status": Status.HELD}
        found = store.machinery_messages.find(query, {"lease": 1})
        return {(one["_id"], one["lease"]) for one in found}

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        ours = self._ours(deliveries)
        return [_name(delivery) in ours for delivery in deliveries]

    def run_begins(self, delivery: Delivery) -> None:
        self._file.begins(run_of(_name(delivery)[0]))
        if not delivery.redelivered:
            return
        # The last worker may have died of it. From now on it counts wherever this one dies.
        try:
            self._note_begun(delivery)
        except MachineryError:
            return  # if it kills this worker now, the next death counts

    @step("beginning a task that came back")
    def _note_begun(self, store: Store, delivery: Delivery) -> None:
        store.machinery_messages.update_one(held(delivery), {"$set": {"begun": 1}})

    def run_ends(self, delivery: Delivery) -> None:
        self._file.ends(run_of(_name(delivery)[0]))

    # Heartbeats

    def beat(self) -> bool:
        if self._closed:
            return True
        with self._starting:
            self._file.touch()
            if self._beat():
                return True
            before = self.session
            self._file.end()
            self._start_session()
            # The old session may have claimed something after it was given up.
            self._release(before)
            return False

    @step("beating")
    def _beat(self, store: Store) -> bool:
        return beat_in(store, self.session, now=self.driver.now(), stalled=False)

    @step("giving messages back")
    def _release(self, store: Store, session: str, *, ends: bool = False) -> None:
        """Give back what the session holds; `ends`: after its document is deleted."""
        if ends:
            store.machinery_sessions.delete_one({"_id": session})
        release(store, session, ())

    def wake(self) -> None:
        self._woken = True
        self._notifier.set()

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._notifier.set()
        self._release(self.session, ends=True)
        self._file.end()
        self.driver.notify("messages")


def beat_in(store: Store, session: str, *, now: int, stalled: bool) -> bool:
    """Beat for a session; False if it was given up."""
    beat: Document = {"$inc": {"beats": 1}, "$set": {"beat_at": now, "stalled": stalled}}
    return store.machinery_sessions.update_one({"_id": session}, beat).matched_count > 0


def update_at_end(end: DeliveryEnd, now: int, **more: object) -> Document:
    """Return the update of a message that is not done. `more`: fields that are set as well."""
    fields: Document = {**FREE, "status": Status.WAITING}
    if end.fate is Fate.LATER:
        due_at = 0 if end.eta is None else micros(end.eta)
        status = Status.DELAYED if due_at > now else Status.WAITING
        fields |= {"status": status, "due_at": due_at}
    elif end.fate is Fate.DEAD:
        facts = {"uuid": end.uuid, "name": end.name, "reason": end.reason, "error": end.error}
        fields |= {"status": Status.DEAD, "died_at": now}
        fields |= {key: printable(value) for key, value in facts.items() if value}
    is_parked = end.fate is Fate.LATER and end.reason != WAITING
    return {"$set": {**fields, **more}, **({"$inc": {"parks": 1}} if is_parked else {})}


def _numbered(documents: Iterable[Document], fence: Fence) -> list[_Claimed]:
    """Give the documents this fence and those that follow it."""
    return [(one, Fence(fence + index)) for index, one in enumerate(documents)]


def _name(delivery: Delivery) -> tuple[str, str]:
    """Return id and lease of a delivery's message."""
    receipt = receipt_of(delivery)
    return receipt.id, receipt.lease
