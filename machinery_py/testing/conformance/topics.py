"""Promises of every broker about topics. Part of BrokerConformance."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from machinery_py.brokers.base import Broker
from machinery_py.brokers.topics import MAX_RECORD, TOPIC_LENGTH, Subscription
from machinery_py.errors import PublishRefused, Unsupported
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.leases import BrokerCase, OpenBroker
from machinery_py.testing.waiting import HANG, wait_until

SHORT = 0.05  # seconds of a wait in which no record comes
LONG = 60.0  # seconds that records are kept
ROUNDS = 5  # records, each of which a reader waits for
AT_ONCE = 2.0  # seconds for all of them: a reader that looked each second would need 4
BATCH = 500  # records of one call in which a topic is filled
FOREIGN = (b"", b"\x00", bytes(range(256)), b'{"id": ', b"\xff" * MAX_RECORD)


def numbered(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


class TopicConformance(BrokerCase):
    """Records for all that subscribe."""

    @pytest.fixture
    def topical(self, broker: Broker) -> Broker:
        """Return a broker with topics. One without must refuse; the test is then skipped."""
        if broker.features.topics:
            return broker
        for act in (lambda: broker.broadcast("t", [b"x"], ttl=LONG), lambda: broker.subscribe("t")):
            with pytest.raises(Unsupported):
                act()
        pytest.skip(f"{broker.features.name} refuses topics, in words")

    @pytest.fixture
    def elsewhere(self, topical: Broker, open_broker: OpenBroker) -> Iterator[Broker]:
        """Open the broker of another process."""
        elsewhere = open_broker()
        yield elsewhere
        if elsewhere is not topical:
            elsewhere.close()

    @pytest.fixture
    def subscription(self, topical: Broker) -> Iterator[Subscription]:
        """Subscribe to the topic t."""
        subscription = topical.subscribe("t")
        yield subscription
        subscription.close()

    def await_records(self, subscription: Subscription, count: int) -> None:
        """Return when so many unread records are there: for stores that bring them by and by."""

    def test_every_subscription_gets_all_records_in_order(
        self, topical: Broker, subscription: Subscription, elsewhere: Broker
    ) -> None:
        other = elsewhere.subscribe("t")
        third = elsewhere.subscribe("u")
        elsewhere.broadcast("t", [b"1", b"2"], ttl=LONG)
        elsewhere.broadcast("u", [b"of another topic"], ttl=LONG)
        elsewhere.broadcast("t", [b"3"], ttl=LONG)
        elsewhere.broadcast("t", [], ttl=LONG)

        for one in (subscription, other):
            assert taken(one, 3) == [b"1", b"2", b"3"]
            assert one.read(SHORT) == []
            assert one.missed == 0
        assert taken(third, 1) == [b"of another topic"]
        other.close()
        third.close()

    def test_record_that_nobody_waits_for_is_gone(self, topical: Broker) -> None:
        topical.broadcast("t", [b"early"], ttl=LONG)
        subscription = topical.subscribe("t")
        assert subscription.read(SHORT) == []

        topical.broadcast("t", [b"late"], ttl=LONG)
        assert taken(subscription, 1) == [b"late"]
        subscription.close()
        topical.broadcast("t", [b"too late"], ttl=LONG)
        assert subscription.read(HANG) == []

    def test_subscription_can_begin_with_records_of_the_past(
        self, topical: Broker, clock: ManualClock
    ) -> None:
        for body in (b"old", b"new"):
            topical.broadcast("t", [body], ttl=LONG)
            clock.advance(2.0)

        subscription = topical.subscribe("t", since=3.0)
        topical.broadcast("t", [b"next"], ttl=LONG)

        expected = [b"new", b"next"] if topical.features.keeps_topics else [b"next"]
        assert taken(subscription, len(expected)) == expected
        assert subscription.missed == 0
        subscription.close()

    def test_record_past_its_time_is_not_handed_out(
        self, topical: Broker, subscription: Subscription, clock: ManualClock
    ) -> None:
        topical.broadcast("t", [b"short"], ttl=1.0)
        topical.broadcast("t", [b"long"], ttl=LONG)
        topical.broadcast("t", [b"short"], ttl=1.0)
        self.await_records(subscription, 3)
        clock.advance(1.5)

        assert taken(subscription, 1) == [b"long"]
        late = topical.subscribe("t", since=LONG)
        assert late.read(SHORT) == ([b"long"] if topical.features.keeps_topics else [])
        late.close()

    def test_slow_reader_gets_the_newest_records_and_their_gap(
        self, topical: Broker, subscription: Subscription
    ) -> None:
        topical.broadcast("t", [b"first"], ttl=LONG)
        assert taken(subscription, 1) == [b"first"]
        count = TOPIC_LENGTH + 3 * BATCH
        for first in range(0, count, BATCH):
            topical.broadcast("t", numbered(first, BATCH), ttl=LONG)

        found = taken_up_to(subscription, b"%d" % (count - 1))

        assert found == numbered(count - len(found), len(found))
        assert TOPIC_LENGTH <= len(found) < count
        assert subscription.missed == count - len(found)

    def test_batch_of_a_thousand_is_one_call(
        self, subscription: Subscription, elsewhere: Broker
    ) -> None:
        elsewhere.broadcast("t", numbered(0, 1000), ttl=LONG)
        assert taken(subscription, 1000) == numbered(0, 1000)
        assert subscription.missed == 0

    def test_any_bytes_are_handed_out_as_they_are(
        self, subscription: Subscription, elsewhere: Broker
    ) -> None:
        elsewhere.broadcast("t", FOREIGN, ttl=LONG)
        assert taken(subscription, len(FOREIGN)) == list(FOREIGN)

    def test_record_that_is_too_large_is_refused_with_its_batch(
        self, subscription: Subscription, topical: Broker
    ) -> None:
        with pytest.raises(PublishRefused, match=r"topic 't': .* 65,537 bytes") as refused:
            topical.broadcast("t", [b"fine", b"x" * (MAX_RECORD + 1)], ttl=LONG)

        assert refused.value.permanent
        assert subscription.read(SHORT) == []

    def test_waiting_reader_gets_each_record_at_once(
        self, subscription: Subscription, elsewhere: Broker
    ) -> None:
        found: list[bytes] = []

        def read() -> None:
            while len(found) < ROUNDS:
                found.extend(subscription.read(HANG))

        def wait_for(number: int) -> None:
            wait_until(lambda: len(found) > number, what="the record")

        reader = threading.Thread(target=read, daemon=True)  # it does not end if a record is lost
        reader.start()
        started = time.monotonic()
        for number in range(ROUNDS):
            elsewhere.broadcast("t", [b"%d" % number], ttl=LONG)
            wait_for(number)
        reader.join(HANG)

        assert found == numbered(0, ROUNDS)
        assert time.monotonic() - started < AT_ONCE

    @pytest.mark.parametrize("ended_by", ["wake", "close"])
    def test_waiting_reader_is_woken(self, subscription: Subscription, ended_by: str) -> None:
        read = _Reading(subscription)
        getattr(subscription, ended_by)()
        assert read.result() == []

    def test_wake_ends_the_next_read_and_no_other(
        self, subscription: Subscription, topical: Broker
    ) -> None:
        subscription.wake()
        assert subscription.read(2 * HANG) == []
        started = time.monotonic()
        assert subscription.read(SHORT) == []
        assert time.monotonic() - started > SHORT / 2
        topical.broadcast("t", [b"1"], ttl=LONG)
        assert taken(subscription, 1) == [b"1"]
        subscription.close()
        subscription.close()


class _Reading:
    """A thread in one `read`, which would wait longer than a test may."""

    def __init__(self, subscription: Subscription) -> None:
        self._found: list[bytes] = []
        self._thread = threading.Thread(target=self._read, args=(subscription,))
        self._thread.start()

    def _read(self, subscription: Subscription) -> None:
        self._found += subscription.read(2 * HANG)

    def result(self) -> list[bytes]:
        self._thread.join(HANG)
        assert not self._thread.is_alive()
        return self._found


def taken(subscription: Subscription, count: int) -> list[bytes]:
    """Read until there are so many records."""
    found: list[bytes] = []

    def is_enough() -> bool:
        found.extend(subscription.read(SHORT))
        return len(found) >= count

    wait_until(is_enough, what=f"{count} records")
    return found


def taken_up_to(subscription: Subscription, last: bytes) -> list[bytes]:
    """Read until this record has come."""
    found: list[bytes] = []

    def is_there() -> bool:
        found.extend(subscription.read(SHORT))
        return last in found[-1:]

    wait_until(is_there, what=f"record {last!r}")
    return found
