"""A consumer loses its connection between two steps: its messages exist once, or share a UUID."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

import pytest

from machinery_py.brokers.base import Delivery, Disposal, Fate
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.consumer import AMQPConsumer
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.config.config import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.io_thread import Channel
from machinery_py.testing.conformance.leases import bodies, done, put
from machinery_py.testing.waiting import HANG, wait_until
from tests.stores.rabbitmq.case import crash


@pytest.fixture(params=["classic", "quorum"])
def broker(request: pytest.FixtureRequest, amqp_url: str) -> Iterator[AMQPBroker]:
    arguments = {"x-queue-type": "quorum"} if request.param == "quorum" else {}
    driver = AmqpDriver(amqp_url, timeout=20.0)
    broker = AMQPBroker(
        driver, Topology(AMQPConfig(queue_declare_args=arguments), "machinery_tasks")
    )
    yield broker
    broker.close()
    driver.close()


def die_before_acknowledging(consumer: AMQPConsumer) -> None:
    """What it publishes is stored; then its connection ends, and nothing is acknowledged."""
    settle = consumer._settle

    def dying(channel: Channel, tags: Sequence[tuple[int, bool]]) -> bool:
        channel.link.abort()
        return settle(channel, tags)

    consumer._settle = dying  # type: ignore[method-assign]


def all_of(broker: AMQPBroker, count: int) -> list[Delivery]:
    """What another consumer gets, until it has so many; and no more come with them."""
    consumer = broker.consume(["q"], worker="heir")
    found: list[Delivery] = []
    wait_until(
        lambda: found.extend(consumer.receive(9, 0.2)) or len(found) >= count,
        HANG,
        f"{count} messages",
    )
    assert consumer.receive(9, 0.5) == []
    assert all(consumer.dispose(done(*found)))
    return found


def taken(broker: AMQPBroker, *, suspect: bool = False) -> tuple[AMQPConsumer, Delivery]:
    """A consumer with one delivery in its hands."""
    put(broker, b"1")
    consumer = broker.consume(["q"], worker="w")
    (delivery,) = consumer.receive(1, HANG)
    if suspect:
        consumer.run_begins(delivery)
        crash(broker, consumer)
        (delivery,) = consumer.receive(1, HANG)
        assert delivery.strikes == 1
    return consumer, delivery


@pytest.mark.parametrize("fate", [Fate.LATER, Fate.DEAD])
def test_message_republished_but_not_acknowledged_is_there_twice(
    broker: AMQPBroker, fate: Fate
) -> None:
    consumer, delivery = taken(broker)
    die_before_acknowledging(consumer)
    eta = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=0.3)

    assert consumer.dispose(
        [Disposal(delivery=delivery, fate=fate, eta=eta, reason="unregistered")]
    ) == [False]

    assert bodies(all_of(broker, 2 if fate is Fate.LATER else 1)) == [b"1"] * (
        2 if fate is Fate.LATER else 1
    )
    assert len(broker.dead_letters(limit=9)) == (fate is Fate.DEAD)


def test_delivery_put_back_but_not_acknowledged_is_there_once(broker: AMQPBroker) -> None:
    consumer, delivery = taken(broker)
    die_before_acknowledging(consumer)

    assert consumer.dispose([Disposal(delivery=delivery, fate=Fate.BACK)]) == [False]

    assert bodies(all_of(broker, 1)) == [b"1"]


def test_suspect_comes_back_with_its_held_copy(broker: AMQPBroker) -> None:
    consumer, delivery = taken(broker, suspect=True)
    die_before_acknowledging(consumer)

    consumer.run_begins(delivery)

    found = all_of(broker, 2)
    assert bodies(found) == [b"1", b"1"]
    assert sorted(one.strikes for one in found) == [1, 2]
    assert consumer.is_lost(delivery)


def test_a_suspect_that_was_running_comes_back_once_with_one_more_strike(
    broker: AMQPBroker,
) -> None:
    consumer, delivery = taken(broker, suspect=True)
    consumer.run_begins(delivery)
    assert not consumer.is_lost(delivery)

    assert consumer._connection is not None
    consumer._connection.link.abort()

    found = all_of(broker, 1)
    assert [(one.body, one.strikes) for one in found] == [(b"1", 2)]


def test_suspect_put_back_but_not_acknowledged_is_there_twice(
    broker: AMQPBroker,
) -> None:
    consumer, delivery = taken(broker, suspect=True)
    consumer.run_begins(delivery)
    die_before_acknowledging(consumer)

    assert consumer.dispose([Disposal(delivery=delivery, fate=Fate.BACK)]) == [False]

    assert bodies(all_of(broker, 2)) == [b"1", b"1"]
