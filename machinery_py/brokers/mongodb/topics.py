"""Topics in MongoDB: a document for each record, and one for each topic that counts them.

    <topic>            `born` (µs), `number` of records so far, `until`
    <topic>:<place>    `topic`, `place`, `number`, `at`, `until`, `body`

The place of a record is `born` + its number: places of a topic grow, also when it was forgotten and
begins anew. A sender first takes numbers, and then writes: a reader that finds a gap waits for it,
and counts it as missed after GAP.

Limits: a subscription looks for records, ever more rarely while nothing comes, once a second at
last; those that its own process sends wake it at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from bson.binary import Binary
from pymongo import ReturnDocument

from machinery_py.brokers.topics import TOPIC_AGE, TOPIC_LENGTH, Subscription, check_records
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    insert_new,
    step,
)
from machinery_py.errors import BrokerUnavailable, PublishRefused, PublishUnknown

SOONEST, LATEST = 0.01, 1.0  # seconds between two looks
GAP = 0.5  # seconds that a sender has between taking numbers and writing
READ = 500  # records of one look
TRIM = 100  # records between two deletions of old ones
NOTIFIER = "topics"


def broadcast(driver: MongoDriver, topic: str, records: Sequence[bytes], ttl: float) -> None:
    """Write the records, and wake the subscriptions of this process."""
    check_records(topic, records)
    if not records:
        return
    driver.run(
        lambda store: _write(store, topic, records, now=driver.now(), ttl=ttl),
        doing="sending to a topic",
        away=BrokerUnavailable,
        again=False,
        lost=PublishUnknown,
        refused=PublishRefused,
    )
    driver.notify(NOTIFIER)


def _write(store: Store, topic: str, records: Sequence[bytes], *, now: int, ttl: float) -> None:
    until = now + int(min(ttl, TOPIC_AGE) * 1e6)
    counter = _counted(store, topic, len(records), now=now, until=until)
    born, last = int(counter["born"]), int(counter["number"])
    first = last - len(records) + 1
    documents: list[Document] = [
        {
            "_id": f"{topic}:{born + number}",
            "topic": topic,
            "place": born + number,
            "number": number,
            "at": now,
            "until": until,
            "body": Binary(bytes(body)),
        }
        for number, body in enumerate(records, first)
    ]
    store.machinery_topics.insert_many(documents)
    if first == 1 or last // TRIM != (first - 1) // TRIM:
        too_many = {"topic": topic, "place": {"$lte": born + last - TOPIC_LENGTH}}
        store.machinery_topics.delete_many({"$or": [too_many, {"until": {"$lte": now}}]})


def _counted(store: Store, topic: str, count: int, *, now: int, until: int) -> Document:
    """Take the next `count` numbers of a topic; return its document with the last of them."""
    update: Document = {"$inc": {"number": count}, "$max": {"until": until}}
    while True:
        found = store.machinery_topics.find_one_and_update(
            {"_id": topic}, update, return_document=ReturnDocument.AFTER
        )
        if found is not None:
            return found
        new: Document = {"_id": topic, "born": now, "number": 0, "until": until}
        insert_new(store.machinery_topics, [new])


class MongoSubscription(DriverUser, Subscription):
    """The place of the last record that was read."""

    unavailable = BrokerUnavailable

    def __init__(self, driver: MongoDriver, topic: str, since: float) -> None:
        super().__init__(driver)
        self._topic = topic
        self._notifier: threading.Event = driver.notifier(NOTIFIER)
        self._born = 0  # of the topic when it was read last; 0: not read yet
        self._gap_at = 0.0  # when the gap behind the last record was found; 0: there is none
        self._woken = self._closed = False
        self._active_at = time.monotonic()
        self._after = self._begin(since)

    @step("subscribing to a topic")
    def _begin(self, store: Store, since: float) -> int:
        """Return the place behind which the subscription begins."""
        if since > 0:
            new = {"topic": self._topic, "at": {"$gte": self.driver.now() - int(since * 1e6)}}
            first = store.machinery_topics.find_one(new, {"place": 1}, sort=[("place", 1)])
            if first is not None:
                return int(first["place"]) - 1
        counter = store.machinery_topics.find_one({"_id": self._topic}) or {}
        self._born = int(counter.get("born", 0))
        return self._born + int(counter.get("number", 0))

    def read(self, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        while not self._closed:
            found = self._passed(self._look())
            now = time.monotonic()
            if found or self._woken or now >= deadline:
                self._woken = False
                return found
            pause = SOONEST if self._gap_at else min(LATEST, (now - self._active_at) / 10)
            self._notifier.wait(min(max(SOONEST, pause), deadline - now))
            self._notifier.clear()
        return []

    @step("reading a topic")
    def _look(self, store: Store) -> list[Document]:
        behind = {"topic": self._topic, "place": {"$gt": self._after}}
        return list(store.machinery_topics.find(behind).sort("place", 1).limit(READ))

    def _passed(self, records: Sequence[Document]) -> list[bytes]:
        """Go on behind these records, up to a gap that is still waited for."""
        now, moment = self.driver.now(), time.monotonic()
        found: list[bytes] = []
        for record in records:
            place, born = record["place"], record["place"] - record["number"]
            gap = place - self._after - 1 if born == self._born else 0
            if gap > 0:
                self._gap_at = self._gap_at or moment
                if moment - self._gap_at < GAP:
                    break
            self._gap_at = 0.0
            self._after, self._born, self._active_at = place, born, moment
            is_over = record["until"] <= now
            self.missed += gap + is_over
            if not is_over:
                found.append(bytes(record["body"]))
        return found

    def wake(self) -> None:
        self._woken = True
        self._notifier.set()

    def close(self) -> None:
        self._closed = True
        self._notifier.set()
