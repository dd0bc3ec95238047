"""Promises of every broker about deliveries whose consumer dies, stays alive, or closes.

Part of BrokerConformance.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from machinery_py.brokers.base import (
    Broker,
    Consumer,
    DeadLetter,
    Delivery,
    Disposal,
    Fate,
    Message,
)
from machinery_py.receipts import NO_RECEIPT
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import together

#: Opens a broker on the test's store. Each call returns a new handle on it, like a second process.
OpenBroker = Callable[[], Broker]

_numbers = itertools.count(1)


def message(
    body: bytes = b"x",
    *,
    queue: str = "q",
    eta: dt.datetime | None = None,
    priority: int = 0,
    parks: int = 0,
) -> Message:
    return Message(
        uuid=f"task_{next(_numbers)}",
        name="add",
        queue=queue,
        body=body,
        eta=eta,
        priority=priority,
        parks=parks,
    )


def put(broker: Broker, *bodies: bytes, queue: str = "q") -> None:
    assert broker.put([message(body, queue=queue) for body in bodies], token="")


def done(*deliveries: Delivery) -> list[Disposal]:
    return [Disposal(delivery=delivery) for delivery in deliveries]


def back(*deliveries: Delivery) -> list[Disposal]:
    return [Disposal(delivery=delivery, fate=Fate.BACK) for delivery in deliveries]


def seconds(start: dt.datetime, after: float) -> dt.datetime:
    return start + dt.timedelta(seconds=after)


def only_letter(broker: Broker, clock: ManualClock, *, reason: str) -> DeadLetter:
    """Return the only dead letter, which is of task_9 and new."""
    (letter,) = broker.dead_letters(limit=5)
    assert (letter.uuid, letter.name, letter.queue) == ("task_9", "add", "q")
    assert (letter.body, letter.reason, letter.error) == (b"\x00bytes", reason, "ü\n")
    assert letter.strikes == 0
    assert abs((letter.died_at - clock.now()).total_seconds()) < 0.01
    return letter


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


class BrokerCase:
    """Fixtures of a broker suite, to be overridden."""

    #: Seconds without a beat after which the store gives a consumer up.
    lease: float = 10.0

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_broker(self, clock: ManualClock) -> OpenBroker:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_broker")

    @pytest.fixture
    def broker(self, open_broker: OpenBroker) -> Iterator[Broker]:
        broker = open_broker()
        yield broker
        broker.close()

    @pytest.fixture
    def consumer(self, broker: Broker) -> Iterator[Consumer]:
        """Open a consumer of the queue q."""
        consumer = broker.consume(["q"], worker="w")
        yield consumer
        consumer.close()

    def count_from(self, broker: Broker, start: int, *queues: str) -> None:
        """Let the store go on from here with the numbers that it gives to messages of the queues.

        A store that keeps no such counter skips the test.
        """
        pytest.skip("the store keeps no counter of messages")

    def crash_consumer(
        self,
        broker: Broker,
        consumer: Consumer,
        clock: ManualClock,
        survivors: Sequence[Consumer] = (),
    ) -> None:
        """Let the process of `consumer` die or freeze.

        Returns when its deliveries are back in their queues.

        The object can still be called afterwards: then it is the frozen process that continues too
        late. The survivors stay alive. This version is for stores with leases: only the survivors
        beat, until a survivor has looked twice.
        """
        for _ in range(2):
            clock.advance(self.lease * 1.1)
            for survivor in survivors:
                assert survivor.beat()
            broker.tend()


class LeaseConformance(BrokerCase):
    """Held messages: their consumer, and how they come back."""

    def test_message_run_by_a_dead_consumer_returns_with_a_strike(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a")
        (first,) = consumer.receive(1, 0)
        consumer.run_begins(first)
        self.crash_consumer(broker, consumer, clock)

        (second,) = broker.consume(["q"], worker="heir").receive(10, 0)

        assert (second.body, second.queue) == (b"a", "q")
        assert (second.strikes, second.count, second.parks) == (
            first.strikes + 1,
            first.count + 1,
            0,
        )
        assert second.redelivered
        assert second.receipt != first.receipt

    def test_message_held_by_a_dead_consumer_keeps_its_place(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"1", b"2", b"3", b"4")
        assert bodies(consumer.receive(3, 0)) == [b"1", b"2", b"3"]
        self.crash_consumer(broker, consumer, clock)
        put(broker, b"5")

        assert bodies(broker.consume(["q"], worker="heir").receive(10, 0)) == [
            b"1",
            b"2",
            b"3",
            b"4",
            b"5",
        ]

    def test_each_death_is_a_strike(self, broker: Broker, clock: ManualClock) -> None:
        put(broker, b"a")
        seen: list[tuple[int, int]] = []
        for _ in range(4):
            consumer = broker.consume(["q"], worker="w")
            (delivery,) = consumer.receive(1, 0)
            consumer.run_begins(delivery)
            seen.append((delivery.strikes, delivery.count))
            self.crash_consumer(broker, consumer, clock)

        assert seen == [(0, 1), (1, 2), (2, 3), (3, 4)]

    def test_message_not_run_by_a_dead_consumer_gets_no_strike(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"held", b"ran before", b"runs")
        _, before, now = consumer.receive(3, 0)
        consumer.run_begins(before)
        consumer.run_ends(before)
        consumer.run_begins(now)
        self.crash_consumer(broker, consumer, clock)

        found = broker.consume(["q"], worker="heir").receive(5, 0)

        assert [(one.body, one.strikes) for one in found] == [
            (b"held", 0),
            (b"ran before", 0),
            (b"runs", 1),
        ]
        assert [delivery.count for delivery in found] == [2, 2, 2]

    def test_message_only_held_gets_no_strike_however_many_die(
        self, broker: Broker, clock: ManualClock
    ) -> None:
        put(broker, b"runs", b"held")
        for deaths in range(4):
            consumer = broker.consume(["q"], worker="w")
            found = {one.body: one for one in consumer.receive(2, 0)}
            assert {body: one.strikes for body, one in found.items()} == {
                b"runs": deaths,
                b"held": 0,
            }
            consumer.run_begins(found[b"runs"])
            self.crash_consumer(broker, consumer, clock)

    def test_strike_is_for_the_queue_whose_message_ran(
        self, broker: Broker, clock: ManualClock
    ) -> None:
        consumer = broker.consume(["q", "r"], worker="w")
        put(broker, b"held")
        put(broker, b"runs", queue="r")
        found = [*consumer.receive(1, 0), *consumer.receive(1, 0)]
        consumer.run_begins(found[1])
        self.crash_consumer(broker, consumer, clock)

        heir = broker.consume(["q", "r"], worker="heir")
        found = [*heir.receive(1, 0), *heir.receive(1, 0)]
        assert {(one.body, one.strikes) for one in found} == {(b"held", 0), (b"runs", 1)}

    def test_receipt_of_another_store_finds_nothing(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        put(broker, b"a")
        (delivery,) = consumer.receive(1, 0)
        foreign = msgspec.structs.replace(delivery, receipt=NO_RECEIPT)

        assert consumer.holds([foreign, delivery]) == [False, True]
        assert consumer.dispose([*done(foreign), *back(foreign)]) == [False, False]
        consumer.run_begins(foreign)
        consumer.run_ends(foreign)
        assert consumer.dispose(done(delivery)) == [True]

    @pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3, 2**40, 2**53 - 100])
    def test_counters_may_grow_for_years(
        self, broker: Broker, clock: ManualClock, start: int
    ) -> None:
        self.count_from(broker, start, "q", "r")
        consumer = broker.consume(["q", "r"], worker="w")
        put(broker, b"1", b"2", b"3", b"4")
        put(broker, b"5", queue="r")
        found = [*consumer.receive(9, 0), *consumer.receive(9, 0)]
        assert bodies(found) == [b"1", b"2", b"3", b"4", b"5"]
        assert len({(one.queue, one.receipt) for one in found}) == 5
        for one in found[1:]:
            consumer.run_begins(one)
        consumer.run_ends(found[2])
        self.crash_consumer(broker, consumer, clock)

        heir = broker.consume(["q", "r"], worker="heir")
        again = [*heir.receive(9, 0), *heir.receive(9, 0)]
        assert [(one.body, one.strikes) for one in again] == [
            (b"1", 0),
            (b"2", 1),
            (b"3", 0),
            (b"4", 1),
            (b"5", 1),
        ]
        assert heir.holds(again) == [True] * 5
        dead = [Disposal(delivery=one, fate=Fate.DEAD) for one in again[:2]]
        later = Disposal(delivery=again[2], fate=Fate.LATER, eta=seconds(clock.now(), 5.0))
        assert heir.dispose([*dead, later, *back(again[3]), *done(again[4])]) == [True] * 5
        letters = broker.dead_letters(limit=9)
        assert [one.body for one in letters] == [b"2", b"1"]
        assert [one.body for one in broker.take_dead([letters[0].id])] == [b"2"]
        clock.advance(5.5)
        broker.tend()
        assert sorted(bodies(heir.receive(9, 0))) == [b"3", b"4"]

    def test_claimed_suspect_that_did_not_run_keeps_its_strikes(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a")
        consumer.run_begins(consumer.receive(1, 0)[0])
        self.crash_consumer(broker, consumer, clock)
        second = broker.consume(["q"], worker="second")
        assert [one.strikes for one in second.receive(1, 0)] == [1]
        self.crash_consumer(broker, second, clock)
        third = broker.consume(["q"], worker="third")
        (delivery,) = third.receive(1, 0)
        assert delivery.strikes == 1
        third.close()

        assert [one.strikes for one in broker.consume(["q"], worker="heir").receive(1, 0)] == [1]

    def test_dead_letter_keeps_its_strikes(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a")
        consumer.run_begins(consumer.receive(1, 0)[0])
        self.crash_consumer(broker, consumer, clock)
        heir = broker.consume(["q"], worker="heir")
        (delivery,) = heir.receive(1, 0)
        heir.dispose([Disposal(delivery=delivery, fate=Fate.DEAD, reason="poison")])

        assert [letter.strikes for letter in broker.dead_letters(limit=9)] == [1]

    @pytest.mark.parametrize("fate", Fate)
    def test_consumer_that_was_given_up_disposes_of_nothing(
        self, broker: Broker, consumer: Consumer, clock: ManualClock, fate: Fate
    ) -> None:
        put(broker, b"a")
        (old,) = consumer.receive(1, 0)
        self.crash_consumer(broker, consumer, clock)
        heir = broker.consume(["q"], worker="heir")
        (new,) = heir.receive(1, 0)

        assert consumer.holds([old]) == [False]
        assert consumer.dispose([Disposal(delivery=old, fate=fate)]) == [False]

        assert heir.holds([new]) == [True]
        assert heir.dispose(done(new)) == [True]
        assert heir.receive(1, 0) == []
        assert broker.dead_letters(limit=9) == []

    def test_consumer_that_was_given_up_goes_on_as_a_new_one(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a")
        (old,) = consumer.receive(1, 0)
        consumer.run_begins(old)
        self.crash_consumer(broker, consumer, clock)

        assert consumer.beat() is False
        assert consumer.beat() is True

        (new,) = consumer.receive(1, 0)
        assert (new.body, new.strikes) == (b"a", 1)
        assert consumer.dispose(done(old, new)) == [False, True]

    def test_consumer_that_beats_keeps_its_deliveries(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a")
        (delivery,) = consumer.receive(1, 0)
        for _ in range(30):
            clock.advance(self.lease * 0.4)
            assert consumer.beat() is True
            broker.tend()

        assert consumer.holds([delivery]) == [True]
        assert consumer.dispose(done(delivery)) == [True]

    def test_death_of_one_consumer_leaves_the_others_alone(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a", b"b")
        survivor = broker.consume(["q"], worker="survivor")
        consumer.receive(1, 0)
        (kept,) = survivor.receive(1, 0)

        self.crash_consumer(broker, consumer, clock, [survivor])

        assert survivor.holds([kept]) == [True]
        assert bodies(survivor.receive(10, 0)) == [b"a"]
        assert survivor.dispose(done(kept)) == [True]

    def test_holds_is_true_for_held_deliveries_only(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        put(broker, b"a", b"b")
        other = broker.consume(["q"], worker="other")
        (mine,) = consumer.receive(1, 0)
        (theirs,) = other.receive(1, 0)

        assert consumer.holds([mine, theirs]) == [True, False]
        consumer.dispose(done(mine))
        assert consumer.holds([mine, theirs]) == [False, False]
        assert consumer.holds([]) == []

    def test_delivery_of_another_consumer_is_not_disposed_of(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        put(broker, b"a")
        (delivery,) = consumer.receive(1, 0)

        assert broker.consume(["q"], worker="other").dispose(done(delivery)) == [False]

        assert consumer.dispose(done(delivery)) == [True]

    def test_closing_returns_deliveries_at_once_without_a_strike(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        put(broker, b"1", b"2", b"3")
        (one, two) = consumer.receive(2, 0)
        consumer.close()

        found = broker.consume(["q"], worker="heir").receive(10, 0)

        assert bodies(found) == [b"1", b"2", b"3"]
        assert [delivery.strikes for delivery in found] == [0, 0, 0]
        assert [delivery.count for delivery in found] == [one.count + 1, two.count + 1, 1]

    def test_closed_consumer_receives_nothing(self, broker: Broker, consumer: Consumer) -> None:
        put(broker, b"a")
        (delivery,) = consumer.receive(1, 0)
        consumer.close()
        consumer.close()

        assert consumer.dispose(done(delivery)) == [False]
        (again,) = broker.consume(["q"], worker="heir").receive(1, 0)
        assert again.body == b"a"

    def test_closed_consumer_is_not_listed(self, broker: Broker, consumer: Consumer) -> None:
        other = broker.consume(["q"], worker="other")
        consumer.close()

        assert [worker.name for worker in broker.workers()] == ["other"]
        other.close()
        assert broker.workers() == []

    def test_the_living_consumers_are_listed(self, broker: Broker, clock: ManualClock) -> None:
        put(broker, b"a", b"b", b"c")
        consumer = broker.consume(["q", "r"], worker="mail@host")
        other = broker.consume(["r"], worker="other")
        consumer.receive(2, 0)
        clock.advance(2.0)
        consumer.beat()

        workers = {worker.name: worker for worker in broker.workers()}

        assert set(workers) == {"mail@host", "other"}
        mail = workers["mail@host"]
        assert (list(mail.queues), mail.holding) == (["q", "r"], 2)
        assert (list(workers["other"].queues), workers["other"].holding) == (["r"], 0)
        assert (mail.beat_at - mail.started_at).total_seconds() == pytest.approx(2.0, abs=0.5)
        assert mail.session != workers["other"].session
        assert (mail.pid > 0, bool(mail.host)) == (True, True)
        self.crash_consumer(broker, consumer, clock, [other])
        assert [worker.name for worker in broker.workers()] == ["other"]

    def test_consumer_that_another_process_beats_for_is_not_given_up(
        self, broker: Broker, open_broker: OpenBroker, clock: ManualClock
    ) -> None:
        consumer = broker.consume(["q", "r"], worker="w")
        keeper, session = open_broker(), consumer.session
        if not broker.features.beats:
            assert not keeper.beat_for(session, ["q", "r"], stalled=False)
            return
        put(broker, b"a", queue="r")
        held = consumer.receive(1, 0)

        for stalled in (False, True, True):
            clock.advance(self.lease * 0.9)
            assert keeper.beat_for(session, ["q", "r"], stalled=stalled)
            broker.tend()
            assert [one.stalled for one in broker.workers()] == [stalled]

        assert consumer.holds(held) == [True]
        assert consumer.beat()
        assert [(one.session, one.stalled) for one in broker.workers()] == [(session, False)]
        consumer.close()
        assert not keeper.beat_for(session, ["q", "r"], stalled=True)
        assert broker.workers() == []
        keeper.close()

    def test_consumer_that_was_given_up_is_beaten_for_no_more(
        self, broker: Broker, consumer: Consumer, open_broker: OpenBroker, clock: ManualClock
    ) -> None:
        if not broker.features.beats:
            pytest.skip("consumers of this broker do not live by beats")
        session = consumer.session
        self.crash_consumer(broker, consumer, clock)

        assert not open_broker().beat_for(session, ["q"], stalled=True)

        assert broker.workers() == []
        assert not consumer.beat()  # it starts anew
        assert consumer.session not in ("", session)

    def test_two_consumers_never_hold_one_message(
        self, broker: Broker, open_broker: OpenBroker
    ) -> None:
        put(broker, *(b"%d" % number for number in range(400)))

        def drain(_: int) -> list[bytes]:
            handle = open_broker()
            consumer = handle.consume(["q"], worker="w")
            taken: list[bytes] = []
            while found := consumer.receive(3, 0):
                taken += bodies(found)
                assert all(consumer.dispose(done(*found)))
            consumer.close()
            handle.close()
            return taken

        taken = sorted(itertools.chain.from_iterable(together(4, drain)), key=int)
        assert taken == [b"%d" % number for number in range(400)]

    def test_one_of_many_threads_disposes_of_a_delivery(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        put(broker, b"a")
        (delivery,) = consumer.receive(1, 0)

        verdicts = together(16, lambda _: consumer.dispose(done(delivery)))

        assert sorted(verdicts) == [[False]] * 15 + [[True]]

    def test_batch_is_put_whole_or_not_at_all(
        self, broker: Broker, open_broker: OpenBroker
    ) -> None:
        """One receive returns all of a batch or none of it.

        On a store without that feature, all of it arrives in the end.
        """
        batches, size = 20, 25

        def work(index: int) -> list[int]:
            if index == 0:
                for number in range(batches):
                    put(broker, *[b"%d" % number] * size)
                return []
            consumer = open_broker().consume(["q"], worker="w")
            counts: list[int] = []
            while sum(counts) < batches * size:
                counts.append(len(consumer.receive(10_000, 0.05)))
            return counts

        _, counts = together(2, work)
        assert sum(counts) == batches * size
        assert not broker.features.whole_batches or {count % size for count in counts} == {0}
