"""Promises of every broker about paused queues, and about several queues in one call.

Part of BrokerConformance.
"""

from __future__ import annotations

import datetime as dt
import functools
import threading
import time
from collections import Counter

import pytest

from machinery_py.brokers.base import Broker, Consumer, Delivery, Disposal, Fate
from machinery_py.errors import Unsupported
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.leases import (
    BrokerCase,
    OpenBroker,
    back,
    bodies,
    done,
    message,
    put,
)
from machinery_py.testing.waiting import HANG, together, wait_until

SHORT = 0.05  # seconds of a wait in which no message comes


class PauseConformance(BrokerCase):
    """Paused queues, and orders of queues."""

    @pytest.fixture
    def pausing(self, broker: Broker) -> Broker:
        """Return a broker that can pause. One that cannot must refuse; the test is then skipped."""
        if broker.features.pausing:
            return broker
        for act in (broker.pause, broker.resume):
            with pytest.raises(Unsupported):
                act("q")
        assert broker.paused() == frozenset()
        pytest.skip(f"{broker.features.name} refuses to pause queues, in words")

    def test_paused_queue_delivers_nothing(self, pausing: Broker, consumer: Consumer) -> None:
        put(pausing, b"1", b"2")
        pausing.pause("q")
        put(pausing, b"3")

        assert consumer.receive(10, 0) == []
        assert consumer.receive(10, SHORT) == []
        assert pausing.consume(["q"], worker="new").receive(10, SHORT) == []
        (line,) = pausing.stats()
        assert (line.queue, line.waiting, line.running, line.paused) == ("q", 3, 0, True)

        pausing.resume("q")

        assert bodies(consumer.receive(10, 0)) == [b"1", b"2", b"3"]
        assert [line.paused for line in pausing.stats()] == [False]

    def test_pausing_twice_is_as_pausing_once(self, pausing: Broker, consumer: Consumer) -> None:
        put(pausing, b"1")
        pausing.pause("q")
        pausing.pause("q")
        assert pausing.paused() == {"q"}
        pausing.resume("q")
        assert bodies(consumer.receive(10, 0)) == [b"1"]
        pausing.resume("q")
        assert pausing.paused() == frozenset()

    def test_other_queues_deliver_while_one_is_paused(self, pausing: Broker) -> None:
        consumer = pausing.consume(["q", "r", "s"], worker="w")
        for queue in ("q", "r", "s"):
            put(pausing, queue.encode(), queue=queue)
        pausing.pause("q")
        pausing.pause("s")

        assert bodies(consumer.receive(10, 0)) == [b"r"]
        assert pausing.paused() == {"q", "s"}
        pausing.resume("q")
        assert bodies(consumer.receive(10, 0)) == [b"q"]

    def test_queue_can_be_paused_before_it_exists(self, pausing: Broker) -> None:
        pausing.pause("r")
        assert [(line.queue, line.waiting, line.paused) for line in pausing.stats()] == [
            ("r", 0, True)
        ]
        put(pausing, b"a", queue="r")
        consumer = pausing.consume(["r"], worker="w")
        assert consumer.receive(5, 0) == []
        pausing.resume("r")
        assert bodies(consumer.receive(5, 0)) == [b"a"]

    def test_pause_survives_a_restart(self, pausing: Broker, open_broker: OpenBroker) -> None:
        other = open_broker()
        other.pause("q")
        other.close()
        if pausing.features.durable:
            pausing.close()

        again = open_broker()
        put(again, b"a")
        assert again.paused() == {"q"}
        consumer = again.consume(["q"], worker="w")
        assert consumer.receive(5, 0) == []
        again.resume("q")
        assert bodies(consumer.receive(5, 0)) == [b"a"]
        again.close()

    def test_delivery_of_a_paused_queue_can_end_in_every_way(
        self, pausing: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(pausing, b"done", b"back", b"later", b"dead")
        held = consumer.receive(10, 0)
        pausing.pause("q")

        soon = clock.now() + dt.timedelta(seconds=2.0)
        fates = (Fate.DONE, Fate.BACK, Fate.LATER, Fate.DEAD)
        ends = [
            Disposal(delivery=one, fate=fate, eta=soon if fate is Fate.LATER else None)
            for one, fate in zip(held, fates, strict=True)
        ]
        assert consumer.dispose(ends) == [True] * 4
        clock.advance(2.5)
        pausing.tend()

        assert consumer.receive(10, SHORT) == []
        (line,) = pausing.stats()
        assert (line.waiting, line.running, line.delayed, line.dead) == (2, 0, 0, 1)
        pausing.resume("q")
        assert sorted(bodies(consumer.receive(10, 0))) == [b"back", b"later"]

    def test_delayed_message_reaches_its_paused_queue(
        self, pausing: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        pausing.pause("q")
        pausing.put([message(b"late", eta=clock.now() + dt.timedelta(seconds=2.0))], token="")
        assert consumer.receive(5, 0) == []
        clock.advance(2.5)
        pausing.tend()

        assert consumer.receive(5, SHORT) == []
        (line,) = pausing.stats()
        assert (line.waiting, line.delayed) == (1, 0)
        pausing.resume("q")
        assert bodies(consumer.receive(5, 0)) == [b"late"]

    def test_message_of_a_dead_consumer_stays_in_its_paused_queue(
        self, pausing: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        survivor = pausing.consume(["q"], worker="survivor")
        put(pausing, b"1", b"2", b"3")
        assert bodies(consumer.receive(2, 0)) == [b"1", b"2"]
        pausing.pause("q")
        self.crash_consumer(pausing, consumer, clock, [survivor])

        assert survivor.receive(10, SHORT) == []
        assert [(line.waiting, line.running) for line in pausing.stats()] == [(3, 0)]
        pausing.resume("q")
        assert bodies(survivor.receive(10, 0)) == [b"1", b"2", b"3"]

    def test_message_of_a_closed_consumer_stays_in_paused_queue(
        self, pausing: Broker, consumer: Consumer
    ) -> None:
        other = pausing.consume(["q"], worker="other")
        put(pausing, b"1", b"2")
        assert bodies(other.receive(1, 0)) == [b"1"]
        pausing.pause("q")
        other.close()
        assert consumer.receive(10, SHORT) == []
        pausing.resume("q")
        assert bodies(consumer.receive(10, 0)) == [b"1", b"2"]

    def test_paused_queue_delivers_no_priority_either(
        self, pausing: Broker, consumer: Consumer
    ) -> None:
        if not pausing.features.priorities:
            return  # refused, as another test shows
        pausing.pause("q")
        pausing.put([message(b"%d" % level, priority=level) for level in (0, 9, 255)], token="")
        assert consumer.receive(10, SHORT) == []
        pausing.resume("q")
        assert bodies(consumer.receive(10, 0)) == [b"255", b"9", b"0"]

    def test_purged_queue_stays_paused(self, pausing: Broker, consumer: Consumer) -> None:
        put(pausing, b"1", b"2")
        pausing.pause("q")
        assert pausing.purge("q") == 2
        put(pausing, b"3")
        assert consumer.receive(10, 0) == []
        assert pausing.paused() == {"q"}

    @pytest.mark.parametrize("queues", [["q"], ["q", "r"], ["r", "q"]], ids="-".join)
    def test_pause_holds_for_a_receive_that_waits(
        self, pausing: Broker, open_broker: OpenBroker, queues: list[str]
    ) -> None:
        """Resuming ends its wait, too."""
        elsewhere = open_broker()
        consumer = pausing.consume(queues, worker="w")
        found: list[Delivery] = []
        ended = threading.Event()

        def wait() -> None:
            while not found and not ended.is_set():
                found.extend(consumer.receive(5, HANG * 2))

        waiter = threading.Thread(target=wait)
        waiter.start()
        try:
            elsewhere.pause("q")
            put(elsewhere, b"a", b"b")
            probe = open_broker()
            assert probe.consume(queues, worker="probe").receive(5, SHORT * 4) == []
            assert found == []
            assert [line.waiting for line in elsewhere.stats() if line.queue == "q"] == [2]

            elsewhere.resume("q")
            waiter.join(HANG)
            assert sorted(bodies(found + consumer.receive(5, 0))) == [b"a", b"b"]
            probe.close()
        finally:
            ended.set()
            consumer.wake()
            waiter.join(HANG)
            elsewhere.close()

    @pytest.mark.parametrize("arrives", ["put", "resumed"])
    def test_consumer_of_a_paused_queue_wakes_for_another_queue(
        self, pausing: Broker, open_broker: OpenBroker, arrives: str
    ) -> None:
        elsewhere = open_broker()
        put(elsewhere, b"q", queue="q")
        elsewhere.pause("q")
        if arrives == "resumed":
            elsewhere.pause("r")
            put(elsewhere, b"r", queue="r")
        consumer = pausing.consume(["q", "r", "s"], worker="w")

        def act(index: int) -> list[Delivery]:
            if index == 0:
                return consumer.receive(5, HANG * 2)
            if arrives == "put":
                put(elsewhere, b"r", queue="r")
            else:
                elsewhere.resume("r")
            return []

        started = time.monotonic()
        found, _ = together(2, act)
        assert bodies(found) == [b"r"]
        assert time.monotonic() - started < HANG
        elsewhere.close()

    def test_no_claim_is_made_after_pause_has_returned(
        self, pausing: Broker, open_broker: OpenBroker
    ) -> None:
        """Pause and send while consumers drain: after `pause` no more messages become held."""
        handles = [open_broker() for _ in range(3)]
        ended = threading.Event()
        put(pausing, *[b"%d" % number for number in range(300)])
        taken: list[Delivery] = []

        def taken_are(least: int) -> bool:
            return len(taken) >= least

        def drain(index: int) -> None:
            consumer = handles[index].consume(["q", "r"], worker=f"w{index}")
            while not ended.is_set():
                got = consumer.receive(2, SHORT)
                taken.extend(got)
                consumer.dispose(done(*got))

        def pause(_: int) -> None:
            try:
                for size in (50, 100, 150, 200):
                    wait_until(functools.partial(taken_are, size), what=f"{size} claims")
                    pausing.pause("q")
                    rest = _waiting(pausing)
                    put(pausing, b"more")
                    for _ in range(5):
                        assert _waiting(pausing) == rest + 1
                    pausing.resume("q")
                wait_until(lambda: len(taken) == 304, what="all of them")
            finally:
                ended.set()

        together(4, lambda index: pause(index) if index == 3 else drain(index))
        assert Counter(bodies(taken)) == Counter(
            [b"%d" % number for number in range(300)] + [b"more"] * 4
        )
        for handle in handles:
            handle.close()

    # The order of one claim

    def test_queue_order_is_of_one_claim(self, broker: Broker) -> None:
        consumer = broker.consume(["q", "r", "s"], worker="w")
        for queue in ("q", "r", "s"):
            put(broker, *[b"%s%d" % (queue.encode(), number) for number in range(4)], queue=queue)

        first = consumer.receive(1, 0, ("s", "q", "r"))
        assert bodies(first) == [b"s0"]
        assert bodies(consumer.receive(1, 0)) == [b"q0"]
        second = consumer.receive(6, 0, ("r", "s", "q"))
        assert bodies(second) == [b"r0", b"r1", b"r2", b"r3", b"s1", b"s2"]
        assert [delivery.queue for delivery in second] == ["r"] * 4 + ["s"] * 2
        assert consumer.dispose([*done(*first), *back(*second)]) == [True] * 7
        assert bodies(consumer.receive(10, 0, ("s", "q", "r"))) == [
            b"s1",
            b"s2",
            b"s3",
            b"q1",
            b"q2",
            b"q3",
            b"r0",
            b"r1",
            b"r2",
            b"r3",
        ]

    def test_priority_counts_within_a_queue_in_any_queue_order(self, broker: Broker) -> None:
        if not broker.features.priorities:
            return  # refused, as another test shows
        consumer = broker.consume(["q", "r"], worker="w")
        broker.put(
            [
                message(b"q", priority=255),
                message(b"r"),
                message(b"r0", queue="r"),
                message(b"r9", queue="r", priority=9),
            ],
            token="",
        )
        assert bodies(consumer.receive(3, 0, ("r", "q"))) == [b"r9", b"r0", b"q"]

    def test_dead_letters_are_listed_by_queue(self, broker: Broker) -> None:
        consumer = broker.consume(["q", "r"], worker="w")
        for queue in ("q", "r"):
            broker.put([message(b"%d" % number, queue=queue) for number in range(3)], token="")
        held = consumer.receive(6, 0)
        consumer.dispose([Disposal(delivery=delivery, fate=Fate.DEAD) for delivery in held])

        letters = broker.dead_letters(limit=10)

        ids = [letter.id for letter in letters]
        assert len(set(ids)) == 6
        assert all(
            len(id) <= 40 and not set(id) & set(" \t\n'\"\\$*?~|&;<>()#!") for id in ids
        )  # typed into a shell
        taken = broker.take_dead(ids)
        assert sorted((one.queue, one.body) for one in taken) == [
            (queue, b"%d" % n) for queue in ("q", "r") for n in range(3)
        ]
        assert broker.dead_letters(limit=10) == []

    @pytest.mark.parametrize(
        "order", [("q", "r", "s"), ("s", "r", "q"), ("r", "s", "q")], ids="-".join
    )
    @pytest.mark.parametrize("queue", ["q", "r", "s"])
    def test_message_on_any_queue_ends_the_wait_in_any_order(
        self, broker: Broker, open_broker: OpenBroker, order: tuple[str, ...], queue: str
    ) -> None:
        elsewhere = open_broker()
        consumer = broker.consume(["q", "r", "s"], worker="w")
        started = time.monotonic()

        def act(index: int) -> list[Delivery]:
            if index == 0:
                return consumer.receive(5, HANG * 2, order)
            put(elsewhere, b"a", queue=queue)
            return []

        found, _ = together(2, act)
        assert [(one.body, one.queue) for one in found] == [(b"a", queue)]
        assert consumer.dispose(done(*found)) == [True]
        assert time.monotonic() - started < HANG
        elsewhere.close()


def _waiting(broker: Broker) -> int:
    return sum(line.waiting for line in broker.stats())
