"""Promises of every broker: bytes, order, queues, priorities, time, fates, tokens and inspection.

    class TestMyBroker(BrokerConformance):
        @pytest.fixture
        def open_broker(self, clock: ManualClock) -> OpenBroker:
            return lambda: MyBroker("my://localhost", clock=clock)

        def crash_consumer(self, broker, consumer, clock, survivors=()) -> None:
            ...  # only if its consumers are not found dead by missed beats

Tests of dying consumers are in leases.py, of paused queues and other queue orders in pausing.py, of
consumers whose queues change in serving.py, of fair queues in fairness.py, of topics in topics.py.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Sequence

import msgspec
import pytest

from machinery_py.bounds import PURGE_STEP
from machinery_py.brokers.base import (
    WAITING,
    Broker,
    Consumer,
    Delivery,
    Disposal,
    Fate,
    Message,
)
from machinery_py.errors import Unsupported
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fairness import FairConformance
from machinery_py.testing.conformance.leases import (
    LeaseConformance,
    OpenBroker,
    back,
    bodies,
    done,
    message,
    only_letter,
    put,
    seconds,
)
from machinery_py.testing.conformance.pausing import PauseConformance
from machinery_py.testing.conformance.serving import ServeConformance
from machinery_py.testing.conformance.topics import TopicConformance
from machinery_py.testing.waiting import HANG, together, wait_until

__all__ = ["BrokerConformance", "OpenBroker"]

AWKWARD = {
    "empty": b"",
    "NUL": b"a\x00b\x00",
    "every byte": bytes(range(256)),
    "no UTF-8": b"\xff\xfe\xfa",
    "quotes": b"'\";--\\",
    "emoji": "日本語 🎉".encode(),
    "line ends": b"\r\n\n\r",
    "5 MB": b"\x00\xf0 x" * 1_250_000,
}


class BrokerConformance(
    LeaseConformance, PauseConformance, ServeConformance, FairConformance, TopicConformance
):
    """Tests of every promise in brokers/base.py."""

    @pytest.mark.parametrize("body", AWKWARD.values(), ids=AWKWARD)
    def test_bytes_are_read_back_unchanged(
        self, broker: Broker, consumer: Consumer, body: bytes
    ) -> None:
        put(broker, body)
        (first,) = consumer.receive(1, 0)
        assert type(first.body) is bytes
        assert first.body == body
        consumer.dispose(back(first))
        (second,) = consumer.receive(1, 0)
        assert second.body == body
        consumer.dispose([Disposal(delivery=second, fate=Fate.DEAD)])
        assert [letter.body for letter in broker.dead_letters(limit=1)] == [body]

    def test_first_delivery_has_fence_and_counts(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        broker.put([message(b"a", parks=3)], token="")
        (delivery,) = consumer.receive(1, 0)

        assert (delivery.queue, delivery.count, delivery.strikes, delivery.parks) == ("q", 1, 0, 3)
        assert not delivery.redelivered
        hash(delivery.receipt)

    def test_first_delivery_says_when_it_was_sent(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        sent: dict[bytes, dt.datetime] = {}

        def send(number: int) -> None:
            sent[b"%d" % number] = clock.now()
            put(broker, b"%d" % number)

        for number in range(7):
            send(number)
            clock.advance((number % 3) * 2.0)
        first = consumer.receive(1, 0)
        consumer.dispose(back(*first))
        again, *others = [*consumer.receive(3, 0), *consumer.receive(9, 0)]
        send(7)  # to an empty queue

        assert again.sent_at in (None, first[0].sent_at)
        for one in (*first, *others, *consumer.receive(5, HANG)):
            assert one.sent_at
            assert abs((one.sent_at - sent[one.body]).total_seconds()) < 0.3

    def test_oldest_message_is_delivered_first(self, broker: Broker, consumer: Consumer) -> None:
        expected = [b"%d" % number for number in range(60)]
        for body in expected[:30]:
            put(broker, body)
        put(broker, *expected[30:])

        assert bodies(consumer.receive(7, 0)) == expected[:7]
        assert bodies(consumer.receive(100, 0)) == expected[7:]

    def test_any_name_is_a_queue_name(self, broker: Broker) -> None:
        names = ["mail:high", "日本", "a b", "q'\"", "%_*?[x]", "{tag}", "x" * 200]
        for name in names:
            put(broker, name.encode(), queue=name)
        for name in names:
            assert bodies(broker.consume([name], worker="w").receive(5, 0)) == [name.encode()]

    def test_consumer_gets_messages_of_its_queues_only(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        put(broker, b"other", queue="r")

        assert consumer.receive(5, 0) == []
        assert bodies(broker.consume(["r"], worker="w").receive(5, 0)) == [b"other"]

    def test_first_queue_is_served_before_the_second(self, broker: Broker) -> None:
        put(broker, b"r1", b"r2", queue="r")
        put(broker, b"q1", b"q2", b"q3", queue="q")
        consumer = broker.consume(["q", "r"], worker="w")

        assert bodies(consumer.receive(2, 0)) == [b"q1", b"q2"]
        assert bodies(consumer.receive(2, 0)) == [b"q3", b"r1"]
        put(broker, b"q4")
        assert bodies(consumer.receive(5, 0)) == [b"q4", b"r2"]

    def test_higher_priority_is_delivered_first_within_a_queue(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        messages = [message(b"%d" % level, priority=level) for level in (0, 255, 9, 9, 1, 0)]
        if not broker.features.priorities:
            with pytest.raises(Unsupported):
                broker.put(messages, token="")
            return
        broker.put(messages, token="")

        found = consumer.receive(10, 0)

        assert bodies(found) == [b"255", b"9", b"9", b"1", b"0", b"0"]
        assert [delivery.priority for delivery in found] == [255, 9, 9, 1, 0, 0]
        broker.put([message(b"r", queue="r", priority=255), message(b"q")], token="")
        assert bodies(broker.consume(["q", "r"], worker="w").receive(1, 0)) == [b"q"]

    def test_delayed_message_is_neither_early_nor_late(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        broker.put([message(b"late", eta=seconds(clock.now(), 30.0))], token="")
        put(broker, b"now")
        assert bodies(consumer.receive(5, 0)) == [b"now"]

        for _ in range(2):
            clock.advance(14.5)
            consumer.beat()
            broker.tend()
            assert consumer.receive(5, 0) == []
        clock.advance(1.5)
        broker.tend()

        assert bodies(consumer.receive(5, 0)) == [b"late"]

    def test_tend_asks_to_be_called_before_the_next_eta(
        self, broker: Broker, clock: ManualClock
    ) -> None:
        consumer = broker.consume(["q"], worker="w")
        due = seconds(clock.now(), 1.5)
        broker.put([message(b"late", eta=due)], token="")

        for _ in range(20):
            if clock.now() < due:
                clock.advance(max(0.01, broker.tend()))

        assert clock.now() <= seconds(due, 0.5)
        broker.tend()
        assert bodies(consumer.receive(5, HANG)) == [b"late"]

    def test_past_eta_is_no_delay(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        past = seconds(clock.now(), -3600.0).astimezone(dt.timezone(dt.timedelta(hours=9)))
        broker.put(
            [message(b"1", eta=past), message(b"2"), message(b"3", eta=clock.now())], token=""
        )

        assert bodies(consumer.receive(5, 0)) == [b"1", b"2", b"3"]

    def test_eta_may_be_in_any_zone(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        eta = seconds(clock.now(), 5.0).astimezone(dt.timezone(dt.timedelta(hours=-11)))
        broker.put([message(b"late", eta=eta)], token="")
        assert consumer.receive(5, 0) == []
        clock.advance(5.5)
        broker.tend()
        assert bodies(consumer.receive(5, 0)) == [b"late"]

    def test_all_messages_due_at_one_moment_are_delivered(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        eta = seconds(clock.now(), 5.0)
        broker.put([message(b"%d" % number, eta=eta) for number in range(1000)], token="")
        clock.advance(5.5)
        found: list[bytes] = []

        def have_come() -> bool:  # a server may move them one after another
            broker.tend()
            found.extend(bodies(consumer.receive(2000, 0)))
            return len(found) >= 1000

        wait_until(have_come, what="all messages")
        assert sorted(found, key=int) == [b"%d" % number for number in range(1000)]

    @pytest.mark.parametrize("timeout", [0.0, 0.05])
    def test_receive_from_empty_queue_returns_at_its_timeout(
        self, consumer: Consumer, timeout: float
    ) -> None:
        started = time.monotonic()
        assert consumer.receive(5, timeout) == []
        assert time.monotonic() - started < 10.0

    def test_wake_ends_a_waiting_receive(self, consumer: Consumer) -> None:
        def wake() -> None:
            while waiter.is_alive():
                consumer.wake()

        found: list[object] = []
        waiter = threading.Thread(target=lambda: found.append(consumer.receive(5, HANG * 2)))
        waiter.start()
        waker = threading.Thread(target=wake)
        waker.start()
        waiter.join(HANG)
        assert found == [[]]
        waker.join(HANG)

    def test_wake_just_before_receive_is_not_lost(self, consumer: Consumer) -> None:
        consumer.wake()
        started = time.monotonic()
        assert consumer.receive(5, HANG * 2) == []
        assert time.monotonic() - started < HANG

    @pytest.mark.parametrize("arrive", ["put", "given back"])
    def test_arriving_message_ends_a_waiting_receive(
        self, open_broker: OpenBroker, consumer: Consumer, arrive: str
    ) -> None:
        elsewhere = open_broker()
        other = elsewhere.consume(["q"], worker="other")
        if arrive == "given back":
            put(elsewhere, b"a")
        held = other.receive(1, 0)

        def act(index: int) -> list[Delivery]:
            if index == 0:
                return consumer.receive(5, HANG * 2)
            if held:
                other.dispose(back(*held))
            else:
                put(elsewhere, b"a")
            return []

        started = time.monotonic()
        found, _ = together(2, act)

        assert bodies(found) == [b"a"]
        assert time.monotonic() - started < HANG
        elsewhere.close()

    def test_done_delivery_is_gone_for_good(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a")
        (delivery,) = consumer.receive(1, 0)

        assert consumer.dispose(done(delivery)) == [True]

        assert consumer.dispose(done(delivery)) == [False]
        assert consumer.dispose(back(delivery)) == [False]
        self.crash_consumer(broker, consumer, clock)
        assert broker.consume(["q"], worker="heir").receive(5, 0) == []

    def test_batch_returns_a_verdict_per_item(self, broker: Broker, consumer: Consumer) -> None:
        put(broker, b"a", b"b", b"c")
        a, b, c = consumer.receive(3, 0)
        consumer.dispose(done(b))

        assert consumer.dispose(done(a, a, b, c)) == [True, False, False, True]
        assert consumer.dispose([]) == []

    def test_returned_message_keeps_its_place(self, broker: Broker, consumer: Consumer) -> None:
        put(broker, b"1", b"2", b"3")
        one, two = consumer.receive(2, 0)
        put(broker, b"4")

        assert consumer.dispose(back(two, one)) == [True, True]

        found = consumer.receive(10, 0)
        assert bodies(found) == [b"1", b"2", b"3", b"4"]
        counts = [(delivery.count, delivery.strikes, delivery.parks) for delivery in found]
        assert counts == [(2, 0, 0), (2, 0, 0), (1, 0, 0), (1, 0, 0)]

    def test_parked_message_waits_and_counts_its_parks(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"a")
        for turn, (parks, reason) in enumerate([(0, ""), (1, WAITING), (1, ""), (2, "")]):
            (delivery,) = consumer.receive(5, 0)
            assert (delivery.parks, delivery.strikes, delivery.count) == (parks, 0, turn + 1)
            eta = seconds(clock.now(), 5.0)
            later = Disposal(delivery=delivery, fate=Fate.LATER, eta=eta, reason=reason)
            assert consumer.dispose([later]) == [True]
            assert consumer.receive(5, 0) == []
            if broker.features.peeking:
                assert [
                    (parked.body, parked.parks, parked.eta) for parked in broker.delayed(5)
                ] == [(b"a", parks + (reason != WAITING), eta)]
            clock.advance(5.5)
            consumer.beat()
            broker.tend()

    def test_dead_letter_keeps_bytes_and_reason(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"\x00bytes")
        (delivery,) = consumer.receive(1, 0)
        disposal = Disposal(
            delivery=delivery,
            fate=Fate.DEAD,
            reason="poison",
            error="ü\n",
            uuid="task_9",
            name="add",
        )

        assert consumer.dispose([disposal]) == [True]

        only_letter(broker, clock, reason="poison")
        assert consumer.receive(5, 0) == []
        assert consumer.dispose([disposal]) == [False]

    def test_dead_letter_is_taken_once(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"1", b"2", b"3")
        for delivery in consumer.receive(3, 0):
            clock.advance(1.0)
            consumer.dispose([Disposal(delivery=delivery, fate=Fate.DEAD)])

        letters = broker.dead_letters(limit=10)
        assert [letter.body for letter in letters] == [b"3", b"2", b"1"]
        assert broker.dead_letters(limit=2) == letters[:2]
        assert broker.dead_letters(limit=5, queue="q") == letters
        assert broker.dead_letters(limit=5, queue="r") == []

        assert broker.take_dead([letters[0].id, "no such id"]) == [letters[0]]
        assert broker.take_dead([letters[0].id]) == []
        assert broker.dead_letters(limit=10) == letters[1:]

    def test_message_that_was_never_put_can_be_buried(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        minute = seconds(clock.now(), 60.0)
        refused = Message(
            uuid="task_9", name="add", queue="elsewhere", body=b"\x00bytes", eta=minute
        )

        broker.bury(refused, queue="q", reason="refused", error="ü\n")

        letter = only_letter(broker, clock, reason="refused")
        assert consumer.receive(5, 0) == []
        assert broker.take_dead([letter.id]) == [letter]
        assert broker.dead_letters(limit=5) == []

    def test_put_with_a_used_token_does_nothing(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        assert broker.put([message(b"1"), message(b"2")], token="t") is True
        assert broker.put([message(b"1"), message(b"2")], token="t") is False
        assert broker.put([message(b"3")], token="u") is True
        assert [broker.put([message(b"4")], token="") for _ in range(2)] == [True, True]
        clock.advance(590.0)
        consumer.beat()
        broker.tend()
        assert broker.put([message(b"1"), message(b"2")], token="t") is False

        consumer.beat()
        assert bodies(consumer.receive(10, 0)) == [b"1", b"2", b"3", b"4", b"4"]

    def test_one_of_many_threads_puts_with_a_token(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        assert sum(together(8, lambda _: broker.put([message(b"a")], token="t"))) == 1
        assert bodies(consumer.receive(20, 0)) == [b"a"]

    def test_inspecting_a_queue_takes_nothing(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        waiting = [message(b"%d" % number) for number in range(3)]
        minute, soon = seconds(clock.now(), 60.0), seconds(clock.now(), 9.0)
        late = [message(b"late", eta=minute), message(b"r", queue="r", eta=soon)]
        broker.put([*waiting, *late], token="")
        if not broker.features.peeking:
            with pytest.raises(Unsupported):
                broker.pending("q", 5)
            with pytest.raises(Unsupported):
                broker.delayed(5)
            return

        for _ in range(2):
            assert broker.pending("q", 10) == waiting
            assert broker.pending("q", 2) == waiting[:2]
            assert broker.pending("nobody", 2) == []
            assert broker.delayed(10) == [late[1], late[0]]
            assert broker.delayed(1) == [late[1]]
        assert bodies(consumer.receive(10, 0)) == [b"0", b"1", b"2"]
        assert broker.pending("q", 10) == []

    def test_stats_count_each_message_once(self, broker: Broker, clock: ManualClock) -> None:
        started = clock.now()
        consumer = broker.consume(["q", "idle"], worker="w")
        put(broker, b"1", b"2", b"3")
        clock.advance(1.0)
        put(broker, b"4", b"5")
        minute = seconds(clock.now(), 60.0)
        broker.put([message(eta=minute), message(queue="r", eta=minute)], token="")
        one, two, _three = consumer.receive(3, 0)
        consumer.dispose([Disposal(delivery=one, fate=Fate.DEAD), Disposal(delivery=two)])

        stats = {line.queue: line for line in broker.stats()}

        assert set(stats) == {"q", "r", "idle"}
        q, r, idle = stats["q"], stats["r"], stats["idle"]
        assert (q.waiting, q.running, q.delayed, q.dead) == (2, 1, 1, 1)
        assert (r.waiting, r.running, r.delayed, r.dead, r.oldest_at) == (0, 0, 1, 0, None)
        assert (idle.waiting, idle.running, idle.delayed, idle.dead) == (0, 0, 0, 0)
        assert (q.oldest_at is not None) == broker.features.tells_age
        assert not q.oldest_at or abs((q.oldest_at - started).total_seconds() - 1.0) <= 0.5

    def test_purge_deletes_waiting_messages_only(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"held", b"1", b"2")
        (held,) = consumer.receive(1, 0)
        eta = seconds(clock.now(), 5.0)
        others = [message(b"r late", queue="r", eta=eta), message(b"r", queue="r")]
        broker.put([message(b"late", eta=eta), *others], token="")

        assert (broker.purge("q"), broker.purge("q"), broker.purge("nobody")) == (3, 0, 0)

        clock.advance(5.5)
        broker.tend()
        assert consumer.receive(5, 0) == []
        assert consumer.dispose(back(held)) == [True]
        assert bodies(consumer.receive(5, 0)) == [b"held"]
        assert sorted(bodies(broker.consume(["r"], worker="w").receive(5, 0))) == [b"r", b"r late"]

    def test_messages_are_seen_before_they_are_purged(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"held")
        (held,) = consumer.receive(1, 0)
        bodies_put = [b"%d" % number for number in range(PURGE_STEP + 1)]
        put(broker, *bodies_put)
        eta = seconds(clock.now(), 5.0)
        broker.put([message(b"r", queue="r")], token="")
        if broker.features.peeking:  # else nobody finds what is delayed before it is due
            broker.put([message(b"late", eta=eta)], token="")

        def refuse(_: object) -> None:
            raise KeyError

        with pytest.raises(KeyError):
            list(broker.purge_each("q", refuse))
        seen: list[Message] = []
        gone = [one for step in broker.purge_each("q", seen.extend) for one in step]

        if broker.features.peeking:
            assert sorted(one.body for one in gone) == sorted([*bodies_put, b"late"])
            assert [one.body for one in seen] == [one.body for one in gone]
        assert list(broker.purge_each("nobody", seen.extend)) in ([], [[]])
        clock.advance(5.5)
        broker.tend()
        assert consumer.receive(5, 0) == []
        assert consumer.dispose(back(held)) == [True]
        assert bodies(consumer.receive(5, 0)) == [b"held"]
        assert bodies(broker.consume(["r"], worker="w").receive(5, 0)) == [b"r"]

    def test_half_a_surrogate_pair_in_a_name_stops_no_message(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        half, body = "\ud800", b"\xff\xed\xa0\x80"
        one = msgspec.structs.replace(message(body), uuid=half, name=half, tenant=half)
        assert broker.put([one], token="")
        following = msgspec.structs.replace(message(b"next"), tenant=half)
        assert broker.put([following], token="")
        (delivery,) = consumer.receive(1, 1.0)
        assert delivery.body == body

        dead = Disposal(
            delivery=delivery, fate=Fate.DEAD, reason=half, error=half, uuid=half, name=half
        )
        assert consumer.dispose([dead]) == [True]
        [letter] = broker.dead_letters(limit=9)
        assert letter.body == body
        written_out = (r"\ud800",) * 4
        assert (letter.uuid, letter.name, letter.reason, letter.error) == written_out
        assert bodies(consumer.receive(9, 1.0)) == [b"next"]

    def test_purge_looks_at_one_step_at_a_time(self, broker: Broker, consumer: Consumer) -> None:
        if not broker.features.peeking:
            return
        put(broker, *[b"%d" % number for number in range(3 * PURGE_STEP)])
        seen: list[Message] = []
        steps = broker.purge_each("q", seen.extend)
        next(steps)
        claimed = bodies(consumer.receive(3 * PURGE_STEP, 1.0))
        gone = [one.body for step in steps for one in step]

        assert claimed
        assert not {one.body for one in seen}.intersection(claimed)
        assert set(gone).isdisjoint(claimed)

    def test_what_is_sent_during_a_purge_stays(self, broker: Broker, clock: ManualClock) -> None:
        if not broker.features.peeking:
            return
        put(broker, *[b"old"] * (PURGE_STEP + 1))
        eta = seconds(clock.now(), 5.0)
        broker.put([message(b"old", eta=eta)], token="")

        def send(messages: Sequence[Message]) -> None:
            assert {one.body for one in messages} == {b"old"}
            new = [message(b"new %d" % number) for number, _ in enumerate(messages)]
            broker.put([*new, message(b"new, late", eta=eta)], token="")

        gone = [one for step in broker.purge_each("q", send) for one in step]

        assert len(gone) == PURGE_STEP + 2
        assert broker.purge("q") > len(gone)

    def test_queue_that_is_over_is_forgotten(
        self, open_broker: OpenBroker, clock: ManualClock
    ) -> None:
        broker, sender = open_broker(), open_broker()  # the sender knows the queue from before
        sender.put([message(queue=queue) for queue in ("q", "r")], token="")
        if not broker.features.forgets_queues:
            with pytest.raises(Unsupported):
                broker.forget_queue("q")
            return

        assert not broker.forget_queue("q")  # something waits
        consumer = broker.consume(["q"], worker="w")
        (held,) = consumer.receive(1, 0)
        assert not broker.forget_queue("q")  # something is held
        consumer.dispose([Disposal(delivery=held, fate=Fate.DEAD)])
        assert not broker.forget_queue("q")  # it is served, and something is dead
        consumer.close()
        assert not broker.forget_queue("q")
        broker.take_dead([broker.dead_letters(limit=1)[0].id])
        if broker.features.pausing:
            broker.pause("q")
            assert not broker.forget_queue("q")
            broker.resume("q")
        sender.put([message(queue="q", eta=seconds(clock.now(), 60.0))], token="")
        assert not broker.forget_queue("q")  # something is delayed
        broker.purge("q")

        assert broker.forget_queue("q")
        assert broker.forget_queue("q")
        assert [line.queue for line in broker.stats()] == ["r"]

        sender.put([message(b"anew", queue="q")], token="")
        assert [(line.queue, line.waiting) for line in broker.stats()] == [("q", 1), ("r", 1)]
        consumer = sender.consume(["q"], worker="w")
        assert bodies(consumer.receive(5, 0)) == [b"anew"]
        for handle in (broker, sender):
            handle.close()

    def test_second_handle_sees_the_same_messages(self, open_broker: OpenBroker) -> None:
        one, two = open_broker(), open_broker()
        put(one, b"a")
        (delivery,) = two.consume(["q"], worker="w").receive(1, 0)
        assert delivery.body == b"a"
        assert one.consume(["q"], worker="w").receive(1, 0) == []
        for handle in (one, two):
            handle.close()
            handle.close()

    def test_messages_survive_a_restart(self, open_broker: OpenBroker, clock: ManualClock) -> None:
        broker = open_broker()
        if not broker.features.durable:
            return  # it promises nothing, and there is no call to refuse
        late = Message(uuid="u", name="n", queue="q", body=b"late", eta=seconds(clock.now(), 5.0))
        broker.put([message(b"a"), late], token="t")
        broker.close()

        again = open_broker()
        assert (new := again.put([message(b"a")], token="t")) is not broker.features.deduplicates
        clock.advance(5.5)
        again.tend()
        found = bodies(again.consume(["q"], worker="w").receive(5, 0))
        assert sorted(found) == [*[b"a"] * (1 + new), b"late"]
        again.close()
