"""Promises of brokers with `BrokerFeatures.fair`: in one queue, tenants take turns.

Where there are none, a Server refuses the setting `fair_queues`, and nothing is tested of them. And
of those with `keeps_turns`: what has waited for its turn is next, and leaves half to the others.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

import pytest

from machinery_py.brokers.base import (
    WAITING,
    Broker,
    Consumer,
    Delivery,
    Disposal,
    Fate,
    Message,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.leases import BrokerCase, back, bodies, done, put

MANY = 2000  # messages of the tenant that has many


def of_tenants(*texts: str, priority: int = 0, eta: dt.datetime | None = None) -> list[Message]:
    """Return messages; the first letter of each is its tenant."""
    return [
        Message(
            uuid=f"task_{text}",
            name="add",
            queue="q",
            body=text.encode(),
            eta=eta,
            priority=priority,
            tenant=text[0],
        )
        for text in texts
    ]


def texts(deliveries: Sequence[Delivery]) -> list[str]:
    return [body.decode() for body in bodies(deliveries)]


def wait(consumer: Consumer, clock: ManualClock, turns: Mapping[bytes, float]) -> None:
    """Claim these messages, and let each wait so many seconds for its turn."""
    waits = [
        Disposal(
            delivery=delivery,
            fate=Fate.LATER,
            eta=clock.now() + dt.timedelta(seconds=turns[delivery.body]),
            reason=WAITING,
        )
        for delivery in consumer.receive(len(turns), 0)
    ]
    assert consumer.dispose(waits) == [True] * len(turns)


class FairConformance(BrokerCase):
    """Messages with tenants."""

    def test_tenants_take_turns_and_each_keeps_its_order(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        if not broker.features.fair:
            return
        broker.put(of_tenants(*(f"a{n}" for n in range(MANY))), token="")
        first = consumer.receive(10, 0)
        assert texts(first) == [f"a{n}" for n in range(10)]
        broker.put(of_tenants("b0", "b1", "b2", "c0"), token="")

        assert [one.waiting for one in broker.stats()] == [MANY - 10 + 4]
        assert broker.waiting("q") == MANY - 10 + 4
        listed = broker.pending("q", 3)
        assert [(one.body, one.tenant, one.priority) for one in listed] == [
            (b"b0", "b", 0), (b"c0", "c", 0), (b"a10", "a", 0),
        ]  # fmt: skip
        assert [one.uuid for one in listed] == ["task_b0", "task_c0", "task_a10"]
        found: list[str] = []
        for _ in range(8):
            found += texts(consumer.receive(1, 0))
        assert set(found[:3]) == {"b0", "c0", "a10"}
        assert [one for one in found if one[0] == "a"] == ["a10", "a11", "a12", "a13"]
        assert [one for one in found if one[0] == "b"] == ["b0", "b1", "b2"]
        rest = texts(consumer.receive(MANY, 0))
        assert rest == [f"a{n}" for n in range(14, MANY)]
        assert broker.purge("q") == 0

    def test_higher_priority_goes_before_all_turns(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        if not broker.features.fair:
            return
        broker.put(of_tenants("a0", "a1", "a2", "b0"), token="")
        broker.put(of_tenants("a3", "a4", "b1", priority=7), token="")

        found = consumer.receive(10, 0)

        assert texts(found) == ["a3", "b1", "a4", "a0", "b0", "a1", "a2"]
        assert [one.priority for one in found] == [7, 7, 7, 0, 0, 0, 0]
        # The claims of one priority do not move the turns of another.
        broker.put(of_tenants("c0"), token="")
        assert texts(consumer.receive(10, 0)) == ["c0"]

    def test_given_back_message_keeps_its_turn(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        if not broker.features.fair:
            return
        broker.put(of_tenants("a0", "a1", "a2", "a3", "b0", "b1"), token="")
        held = consumer.receive(4, 0)
        assert texts(held) == ["a0", "b0", "a1", "b1"]
        assert consumer.dispose([*back(held[2], held[0]), *done(held[1])]) == [True] * 3
        assert texts(again := consumer.receive(3, 0)) == ["a0", "a1", "a2"]
        assert [one.count for one in again] == [2, 2, 1]

        self.crash_consumer(broker, consumer, clock)

        heir = broker.consume(["q"], worker="heir")
        assert texts(heir.receive(10, 0)) == ["a0", "a1", "b1", "a2", "a3"]
        heir.close()

    def test_given_back_message_does_not_wait_for_all_that_came_later(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        if not broker.features.fair:
            return
        broker.put(of_tenants(*(f"a{n}" for n in range(9))), token="")
        *others, last = consumer.receive(9, 0)
        broker.put(of_tenants("b0", "b1", "b2", "c0", "c1", "c2"), token="")

        assert consumer.dispose([*done(*others), *back(last)]) == [True] * 9

        assert "a8" in texts(consumer.receive(3, 0))

    def test_delayed_message_gets_its_turn_when_it_is_due(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        if not broker.features.fair:
            return
        later = clock.now() + dt.timedelta(seconds=5)
        broker.put(of_tenants("a0", "a1", eta=later), token="")
        assert {(one.body, one.tenant) for one in broker.delayed(9)} == {
            (b"a0", "a"), (b"a1", "a"),
        }  # fmt: skip
        broker.put(of_tenants("w0"), token="")
        [waits] = consumer.receive(1, 0)
        wait = Disposal(delivery=waits, fate=Fate.LATER, eta=later, reason=WAITING)
        assert consumer.dispose([wait]) == [True]
        broker.put(of_tenants("b0", "b1", "b2"), token="")
        assert texts(consumer.receive(2, 0)) == ["b0", "b1"]

        clock.advance(6.0)
        broker.tend()

        found = texts(consumer.receive(10, 0))
        assert sorted(found) == ["a0", "a1", "b2", "w0"]
        assert found.index("a0") < found.index("a1")
        assert found.index("a1") >= 2  # its tenant's second turn is behind the first of the others

    def test_what_has_waited_for_its_turn_goes_before_what_was_sent_later(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        if not broker.features.keeps_turns:
            pytest.skip("what comes back to this broker goes to the end of its queue")
        put(broker, b"1", b"2", b"3")
        turns = {b"1": 3.0, b"2": 1.0, b"3": 0.0}
        wait(consumer, clock, turns)
        put(broker, b"4", b"5", b"6", b"7")

        assert bodies(consumer.receive(2, 0)) == [b"3", b"4"]
        clock.advance(2.0)
        consumer.beat()
        broker.tend()
        # Looking changes nothing.
        assert [(one.waiting, one.delayed) for one in broker.stats()] == [(4, 1)]
        assert bodies(consumer.receive(2, 0)) == [b"2", b"5"]
        clock.advance(2.0)
        consumer.beat()
        broker.tend()
        assert bodies(consumer.receive(9, 0)) == [b"1", b"6", b"7"]

    def test_those_that_have_waited_leave_half_of_each_claim_to_others(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        if not broker.features.keeps_turns:
            pytest.skip("what comes back to this broker goes to the end of its queue")
        bodies_of_all = [b"%d" % number for number in range(9)]
        put(broker, *bodies_of_all)
        wait(consumer, clock, {body: 1.0 - int(body) / 10 for body in bodies_of_all})
        put(broker, b"a", b"b", b"c", b"d")
        clock.advance(2.0)
        consumer.beat()
        broker.tend()

        found = bodies(consumer.receive(4, 0))
        assert found == [b"8", b"7", b"a", b"b"]  # of those that have waited, the first due first
        # One by one, they take turns.
        assert b"c" in [*bodies(consumer.receive(1, 0)), *bodies(consumer.receive(1, 0))]
        # What nobody else needs is theirs.
        left = bodies(consumer.receive(9, 0)) + bodies(consumer.receive(9, 0))
        assert len(left) == 13 - 4 - 2

    def test_dead_letter_and_purge_of_a_fair_queue(
        self, broker: Broker, consumer: Consumer
    ) -> None:
        if not broker.features.fair:
            return
        broker.put(of_tenants("a0", "a1", "a2"), token="")
        [first] = consumer.receive(1, 0)
        consumer.dispose([Disposal(delivery=first, fate=Fate.DEAD, reason="broken")])

        [letter] = broker.dead_letters(limit=9)
        assert (letter.uuid, letter.name, letter.body) == ("task_a0", "add", b"a0")
        assert broker.purge("q") == 2
        assert [one.waiting for one in broker.stats()] == [0]
        broker.put(of_tenants("a3", "b0"), token="")
        assert texts(consumer.receive(9, 0)) == ["a3", "b0"]
