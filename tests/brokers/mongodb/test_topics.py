"""Topics in MongoDB: senders that are slow or die, and topics that were forgotten."""

from __future__ import annotations

import datetime as dt

import pytest

from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.brokers.mongodb.topics import MongoSubscription
from machinery_py.connections.mongodb.client import Document, Store
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.topics import LONG, SHORT, taken
from tests.stores.mongodb.case import Drivers, clock, open_driver

__all__ = ["clock", "open_driver"]


@pytest.fixture
def broker(open_driver: Drivers) -> MongoBroker:
    return MongoBroker(open_driver())


@pytest.fixture
def subscription(broker: MongoBroker) -> MongoSubscription:
    return broker.subscribe("t")


@pytest.fixture
def store(broker: MongoBroker) -> Store:
    return broker.driver.run(lambda store: store, doing="testing")


def take_away(store: Store, number: int) -> Document:
    document = store.machinery_topics.find_one_and_delete({"topic": "t", "number": number})
    assert document is not None
    return document


def test_records_behind_a_slow_sender_keep_their_order(
    broker: MongoBroker, subscription: MongoSubscription, store: Store
) -> None:
    broker.broadcast("t", [b"1", b"2", b"3"], ttl=LONG)
    late = take_away(store, 2)

    assert subscription.read(0.0) == [b"1"]
    assert subscription.read(SHORT) == []
    store.machinery_topics.insert_one(late)

    assert taken(subscription, 2) == [b"2", b"3"]
    assert subscription.missed == 0


def test_records_of_a_sender_that_died_are_missed(
    broker: MongoBroker, subscription: MongoSubscription, store: Store
) -> None:
    broker.broadcast("t", [b"1", b"2", b"3", b"4"], ttl=LONG)
    for number in (2, 3):
        take_away(store, number)

    assert taken(subscription, 2) == [b"1", b"4"]
    assert subscription.missed == 2


@pytest.mark.parametrize("back", [0, 1])
def test_topic_that_was_forgotten_begins_anew(
    broker: MongoBroker,
    subscription: MongoSubscription,
    store: Store,
    clock: ManualClock,
    back: int,
) -> None:
    broker.broadcast("t", [b"1", b"2"], ttl=1.0)
    assert taken(subscription, 2) == [b"1", b"2"]
    clock.advance(2.0)
    broker.broadcast("another", [b"x"], ttl=1.0)
    assert store.machinery_topics.count_documents({"topic": "t"}) == 0
    assert store.machinery_topics.find_one({"_id": "t"}) is None
    clock._start -= dt.timedelta(days=back)  # it was ahead until now

    broker.broadcast("t", [b"3"], ttl=LONG)

    assert taken(subscription, 1) == [b"3"]
    assert subscription.missed == 0


def test_documents_of_others_are_skipped(
    broker: MongoBroker, subscription: MongoSubscription, store: Store
) -> None:
    broker.broadcast("t", [b"1"], ttl=LONG)
    record = take_away(store, 1)
    place = record.pop("place")
    del record["_id"]
    for change in ({"number": "x"}, {"until": None}, {"body": "text"}, {"number": 0}):
        store.machinery_topics.insert_one({**record, "place": place, **change})
    store.machinery_topics.insert_one({"topic": "t", "place": place})

    broker.broadcast("t", [b"2"], ttl=LONG)

    assert taken(subscription, 1) == [b"2"]
