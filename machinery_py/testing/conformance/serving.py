"""Promises of every broker about consumers whose queues change. Part of BrokerConformance."""

from __future__ import annotations

import threading

import pytest

from machinery_py.brokers.base import Broker, Consumer, Delivery
from machinery_py.errors import Unsupported
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.leases import BrokerCase, OpenBroker, bodies, done, put
from machinery_py.testing.waiting import HANG

SHORT = 0.05  # seconds of a wait in which no message comes


class ServeConformance(BrokerCase):
    """`Consumer.serve`."""

    @pytest.fixture
    def changing(self, consumer: Consumer) -> Consumer:
        """Return a consumer of the queue q that can change its queues; else skip the test."""
        try:
            consumer.serve(["q"])
        except Unsupported:
            pytest.skip("its consumers refuse to change their queues, in words")
        return consumer

    def test_consumer_claims_from_other_queues_once_told(
        self, broker: Broker, changing: Consumer
    ) -> None:
        put(broker, b"1", b"2")
        put(broker, b"3", queue="r")
        held = changing.receive(1, 0)
        assert bodies(held) == [b"1"]

        changing.serve(["r", "s"])
        changing.serve(["r", "s"])

        assert [tuple(worker.queues) for worker in broker.workers()] == [("r", "s")]
        assert bodies(changing.receive(5, 0)) == [b"3"]
        assert changing.receive(5, SHORT) == []
        assert changing.receive(5, SHORT, ["q", "r", "s"]) == []
        assert changing.beat()
        assert changing.holds(held) == [True]
        assert changing.dispose(done(*held)) == [True]

        changing.serve(["s", "q"])

        assert bodies(changing.receive(5, 0, ["q", "s"])) == [b"2"]
        put(broker, b"4", queue="s")
        assert bodies(changing.receive(5, HANG)) == [b"4"]
        changing.serve(["q", "r"])
        assert [tuple(worker.queues) for worker in broker.workers()] == [("q", "r")]

    def test_waiting_consumer_is_woken_for_its_new_queue(
        self, broker: Broker, changing: Consumer
    ) -> None:
        put(broker, b"there", queue="r")
        found: list[Delivery] = []
        ended = threading.Event()

        def wait() -> None:
            while not found and not ended.is_set():
                found.extend(changing.receive(5, 2 * HANG))

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        try:
            changing.serve(["q", "r"])
            waiter.join(HANG)
            assert bodies(found) == [b"there"]
        finally:
            ended.set()
            changing.wake()
            waiter.join(HANG)

    def test_dead_consumer_gives_back_of_all_queues_it_served(
        self, broker: Broker, changing: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"of q")
        put(broker, b"of r", queue="r")
        assert bodies(changing.receive(5, 0)) == [b"of q"]
        broker.tend()  # whoever looks after the dead has seen it by now
        changing.serve(["r"])
        assert bodies(changing.receive(5, 0)) == [b"of r"]

        self.crash_consumer(broker, changing, clock)

        heir = broker.consume(["q", "r"], worker="heir")
        found = [*heir.receive(5, 0), *heir.receive(5, 0)]
        assert sorted(bodies(found)) == [b"of q", b"of r"]
        heir.close()

    def test_consumer_that_is_beaten_for_keeps_what_it_holds_of_all_queues(
        self,
        broker: Broker,
        changing: Consumer,
        open_broker: OpenBroker,
        clock: ManualClock,
    ) -> None:
        if not broker.features.beats:
            pytest.skip("consumers of this broker do not live by beats")
        put(broker, b"of q")
        put(broker, b"of r", queue="r")
        held = changing.receive(5, 0)
        changing.serve(["r"])
        held += changing.receive(5, 0)
        keeper = open_broker()

        for _ in range(3):
            clock.advance(self.lease * 0.9)
            assert keeper.beat_for(changing.session, ["q"], stalled=True)
            broker.tend()
            assert [one.stalled for one in broker.workers()] == [True]

        assert changing.holds(held) == [True, True]
        keeper.close()

    def test_closed_consumer_gives_back_of_all_queues_it_served(
        self, broker: Broker, changing: Consumer
    ) -> None:
        put(broker, b"of q")
        put(broker, b"of r", queue="r")
        changing.receive(5, 0)
        changing.serve(["r"])
        changing.receive(5, 0)
        changing.close()

        heir = broker.consume(["q", "r"], worker="heir")
        found = [*heir.receive(5, 0), *heir.receive(5, 0)]
        assert sorted(bodies(found)) == [b"of q", b"of r"]
        heir.close()

    def test_consumer_that_was_given_up_serves_its_new_queues(
        self, broker: Broker, changing: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"1")
        held = changing.receive(5, 0)
        self.crash_consumer(broker, changing, clock)
        put(broker, b"2", queue="r")

        changing.serve(["r"])

        assert changing.holds(held) == [False]
        assert changing.beat() is False
        assert bodies(changing.receive(5, 0)) == [b"2"]
        assert [tuple(worker.queues) for worker in broker.workers()] == [("r",)]

    def test_new_queue_that_is_paused_stays_paused(
        self, broker: Broker, changing: Consumer
    ) -> None:
        if not broker.features.pausing:
            pytest.skip(f"{broker.features.name} refuses to pause queues, in words")
        broker.pause("r")
        put(broker, b"1", queue="r")
        changing.serve(["q", "r"])
        assert changing.receive(5, SHORT) == []
        broker.resume("r")
        assert bodies(changing.receive(5, 0)) == [b"1"]
