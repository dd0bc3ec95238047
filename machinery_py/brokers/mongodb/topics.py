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
from typing import ClassVar

from bson.binary import Binary
from pymongo import ReturnDocument

from machinery_py.brokers.topics import READ, TOPIC_LENGTH, KeptRecord, KeptSubscription
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    insert_new,
    step,
)
from machinery_py.errors import BrokerUnavailable, MachineryError

SOONEST, LATEST = 0.01, 1.0  # seconds between two looks
GAP = 0.5  # seconds that a sender has between taking numbers and writing
TRIM = 100  # records between two deletions of old ones
NOTIFIER = "topics"


def write_records(
    store: Store, topic: str, records: Sequence[bytes], *, now: int, until: int
) -> None:
    """Take numbers for the records, and write them. Moments are in µs."""
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
            "body": Binary(body),
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
    new: Document = {"_id": topic, "born": now, "number": 0, "until": until}
    query, counters = {"_id": topic}, store.machinery_topics
    after = ReturnDocument.AFTER
    while not (found := counters.find_one_and_update(query, update, return_document=after)):
        insert_new(counters, [new])
    return found


class MongoSubscription(DriverUser, KeptSubscription):
    """The place of the last record that was read."""

    unavailable: ClassVar[type[MachineryError]] = BrokerUnavailable

    def __init__(self, driver: MongoDriver, topic: str, since: float) -> None:
        DriverUser.__init__(self, driver)
        KeptSubscription.__init__(self)
        self._topic = topic
        self._notifier: threading.Event = driver.notifier(NOTIFIER)
        self._gap_at = 0.0  # when the gap behind the last record was found; 0: there is none
        self._active_at = time.monotonic()
        self._begin(since)

    @step("subscribing to a topic")
    def _begin(self, store: Store, since: float) -> None:
        """Find the place behind which the subscription begins."""
        if since > 0:
            new = {"topic": self._topic, "at": {"$gte": self.driver.now() - int(since * 1e6)}}
            first = store.machinery_topics.find_one(new, {"place": 1}, sort=[("place", 1)])
            if first is not None:
                self._after = int(first["place"]) - 1
                return
        counter = store.machinery_topics.find_one({"_id": self._topic}) or {}
        number = int(counter.get("number", 0))
        self._after, self._next = int(counter.get("born", 0)) + number, number + 1

    def _fetch(self, wait: float) -> list[KeptRecord]:
        found, now = self._look(), time.monotonic()
        if found and 0 < self._next < found[0][1]:
            self._gap_at = self._gap_at or now
            if now < self._gap_at + GAP:
                found = []
        if found:
            self._gap_at, self._active_at = 0.0, now
            first = found[0][1]  # up to the next gap
            return [one for number, one in enumerate(found, first) if one[1] == number]
        if wait and not self._gap_at:
            self._follow_new_topic()
        if wait:
            pause = 0.0 if self._gap_at else (now - self._active_at) / 10
            self._notifier.wait(min(max(SOONEST, pause), LATEST, wait))
            self._notifier.clear()
        return []

    @step("reading a topic")
    def _follow_new_topic(self, store: Store) -> None:
        """Go back if the topic was forgotten, and born anew by a clock that was ahead before."""
        counter = store.machinery_topics.find_one({"_id": self._topic}) or {}
        born, number = int(counter.get("born", 0)), int(counter.get("number", 0))
        if 0 < born + number < self._after:
            self._after, self._next = born, 1

    @step("reading a topic")
    def _look(self, store: Store) -> list[KeptRecord]:
        now = self.driver.now()
        behind = {"topic": self._topic, "place": {"$gt": self._after}}
        found: list[KeptRecord] = []
        for one in store.machinery_topics.find(behind).sort("place", 1).limit(READ):
            number, until, body = map(one.get, ("number", "until", "body"))
            if isinstance(number, int) and isinstance(until, int):  # else others have put it there
                counts = until > now and isinstance(body, bytes)
                found.append((one["place"], number, body if counts else None))
        return found

    def wake(self) -> None:
        super().wake()
        self._notifier.set()
