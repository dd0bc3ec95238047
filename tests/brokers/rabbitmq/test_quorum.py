"""Quorum queues: the same promises, with the delay levels and dead letters as quorum queues."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator

import pytest

from machinery_py.brokers.base import Disposal, Fate
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.config.config import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.testing.conformance.leases import back, bodies, done, message, put
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.stores.rabbitmq.case import crash, waiting
from tests.support.servers import RabbitMQServer, require


@pytest.fixture
def broker(amqp_url: str) -> Iterator[AMQPBroker]:
    driver = AmqpDriver(amqp_url, timeout=20.0)
    broker = AMQPBroker(
        driver,
        Topology(AMQPConfig(queue_declare_args={"x-queue-type": "quorum"}), "machinery_tasks"),
    )
    yield broker
    broker.close()
    driver.close()


def test_messages_are_claimed_in_order_and_disposed_of_once(broker: AMQPBroker) -> None:
    put(broker, *(b"%d" % number for number in range(300)))
    consumer = broker.consume(["q"], worker="w")

    taken: list[bytes] = []
    while len(taken) < 300:
        found = consumer.receive(7, 5.0)
        assert 0 < len(found) <= 7
        assert {one.strikes for one in found} == {0}
        assert all(consumer.dispose(done(*found)))
        taken += bodies(found)

    assert taken == [b"%d" % number for number in range(300)]
    assert consumer.receive(1, 0.0) == []


def test_many_consumers_never_hold_one_message(broker: AMQPBroker) -> None:
    put(broker, *(b"%d" % number for number in range(200)))

    def drain(_: int) -> list[bytes]:
        consumer = broker.consume(["q"], worker="w")
        taken: list[bytes] = []
        while found := consumer.receive(5, 1.0):
            taken += bodies(found)
            assert all(consumer.dispose(done(*found)))
        consumer.close()
        return taken

    taken = [body for found in together(3, drain, HANG * 2) for body in found]
    assert sorted(taken, key=int) == [b"%d" % number for number in range(200)]


def test_deliveries_of_a_dead_consumer_come_back(broker: AMQPBroker) -> None:
    put(broker, b"1", b"2")
    consumer = broker.consume(["q"], worker="w")
    assert len(consumer.receive(5, 5.0)) == 2
    crash(broker, consumer)
    heir = broker.consume(["q"], worker="heir")
    found = heir.receive(5, 5.0)

    assert sorted(bodies(found)) == [b"1", b"2"]
    assert [one.strikes for one in found] == [0, 0]
    heir.dispose(back(found[0]))
    assert bodies(heir.receive(5, 5.0)) == [found[0].body]


def test_f70_topology_declared_at_deployment_survives_a_kill() -> None:
    require(RabbitMQServer)
    with RabbitMQServer() as server:
        driver = AmqpDriver(server.url, timeout=20.0)
        broker = AMQPBroker(
            driver,
            Topology(AMQPConfig(queue_declare_args={"x-queue-type": "quorum"}), "machinery_tasks"),
        )
        broker.declare(["q"])

        server.kill()
        server.start()

        late = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=0.2)
        broker.put([message(b"late", eta=late), message(b"1")], token="")
        consumer = broker.consume(["q"], worker="w")
        found = consumer.receive(1, HANG)
        while len(found) < 2:
            found += consumer.receive(1, HANG)
        assert sorted(bodies(found)) == [
            b"1",
            b"late",
        ]  # both are due by now, where the put took long
        assert consumer.dispose(
            [Disposal(delivery=one, fate=Fate.DEAD, reason="poison") for one in found]
        ) == [True, True]
        assert len(broker.dead_letters(limit=5)) == 2
        broker.close()
        driver.close()


def test_subscription_delivers_nothing_after_its_wakeup(broker: AMQPBroker) -> None:
    consumer = broker.consume(["q", "r"], worker="w")
    waker = threading.Timer(0.2, lambda: put(broker, b"1"))
    waker.start()
    (first,) = consumer.receive(5, HANG)
    waker.join()
    put(broker, b"2", b"3")

    assert bodies(broker.consume(["q"], worker="other").receive(1, HANG)) == [b"2"]
    assert consumer.dispose(done(first)) == [True]
    assert waiting(broker, "q") == 1  # and not with the first one
    assert bodies(consumer.receive(5, HANG)) == [b"3"]


@pytest.mark.parametrize("fate", [Fate.BACK, Fate.LATER, Fate.DEAD])
def test_delivery_that_woke_a_consumer_is_settled_as_any_other(
    broker: AMQPBroker, fate: Fate
) -> None:
    consumer = broker.consume(["q"], worker="w")
    waker = threading.Timer(0.2, lambda: put(broker, b"1"))
    waker.start()
    (first,) = consumer.receive(5, HANG)
    waker.join()

    assert consumer.dispose([Disposal(delivery=first, fate=fate)]) == [True]

    if fate is Fate.DEAD:
        assert len(broker.dead_letters(limit=5)) == 1
        assert consumer.receive(5, 0.0) == []
    else:
        assert bodies(consumer.receive(5, HANG)) == [b"1"]


def test_delays_dead_letters_and_looking(broker: AMQPBroker) -> None:
    now = dt.datetime.now(dt.UTC)
    soon, later = (now + dt.timedelta(seconds=seconds) for seconds in (1.2, 3600))
    broker.put([message(b"late", eta=soon), message(b"later", eta=later)], token="")
    consumer = broker.consume(["q"], worker="w")
    assert [one.body for one in broker.delayed(5)] == [b"late", b"later"]

    found = consumer.receive(5, HANG)

    assert bodies(found) == [b"late"]
    assert dt.datetime.now(dt.UTC) >= soon
    assert consumer.dispose([Disposal(delivery=found[0], fate=Fate.DEAD, reason="poison")]) == [
        True
    ]
    (letter,) = broker.dead_letters(limit=5)
    assert (letter.body, letter.reason) == (b"late", "poison")
    put(broker, b"1", b"2")
    assert [one.body for one in broker.pending("q", 5)] == [b"1", b"2"]
    wait_until(lambda: len(broker.pending("q", 5)) == 2, HANG)
    assert broker.purge("q") == 3
