"""Topics in RabbitMQ: broken connections, and records of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pika
import pytest

from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.config.config import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.queues import TOPICS
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.testing.conformance.topics import LONG, SHORT, taken
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQServer


@pytest.fixture
def proxy(rabbitmq_server: RabbitMQServer) -> Iterator[Proxy]:
    with Proxy(rabbitmq_server.start().port) as proxy:
        yield proxy


@pytest.fixture
def broker(amqp_url: str) -> Iterator[AMQPBroker]:
    driver = AmqpDriver(amqp_url)
    yield AMQPBroker(driver, Topology(AMQPConfig(), "machinery_tasks"))
    driver.close()


@pytest.fixture
def through(amqp_url: str, proxy: Proxy) -> Iterator[AMQPBroker]:
    driver = AmqpDriver(proxy.through(amqp_url), timeout=2.0)
    yield AMQPBroker(driver, Topology(AMQPConfig(), "machinery_tasks"))
    driver.close()


def test_subscription_goes_on_when_its_connection_is_lost(
    broker: AMQPBroker, through: AMQPBroker, proxy: Proxy
) -> None:
    subscription = through.subscribe("t")
    broker.broadcast("t", [b"1"], ttl=LONG)
    assert taken(subscription, 1) == [b"1"]
    proxy.refuse()
    proxy.reset()
    wait_until(lambda: not subscription._link.is_open, what="the loss")
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            subscription.read(1.0)
    broker.broadcast("t", [b"2", b"3"], ttl=LONG)
    proxy.heal()

    assert subscription.read(SHORT) == []
    broker.broadcast("t", [b"4"], ttl=LONG)

    assert taken(subscription, 1) == [b"4"]
    subscription.close()


def test_waiting_reader_connects_anew_by_itself(
    broker: AMQPBroker, through: AMQPBroker, proxy: Proxy
) -> None:
    subscription, found = through.subscribe("t"), list[bytes]()

    def read() -> None:
        while not found:
            found.extend(subscription.read(2 * HANG))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    lost = subscription._link
    proxy.reset()
    wait_until(lambda: subscription._link is not lost, what="another connection")
    broker.broadcast("t", [b"x"], ttl=LONG)
    reader.join(HANG)

    assert found == [b"x"]
    subscription.close()


def test_broadcast_goes_on_when_its_connection_is_lost(
    broker: AMQPBroker, through: AMQPBroker, proxy: Proxy
) -> None:
    subscription = broker.subscribe("t")
    through.broadcast("t", [b"1"], ttl=LONG)
    proxy.refuse()
    proxy.reset()
    with pytest.raises(MachineryError):
        through.broadcast("t", [b"2"], ttl=LONG)
    with pytest.raises(BrokerUnavailable):
        through.broadcast("t", [b"3"], ttl=LONG)
    proxy.heal()

    through.broadcast("t", [b"4"], ttl=LONG)

    assert taken(subscription, 2) == [b"1", b"4"]
    subscription.close()


def test_exchange_that_was_deleted_is_declared_again(broker: AMQPBroker) -> None:
    broker.broadcast("t", [b"1"], ttl=LONG)
    with broker.driver.visit("deleting") as channel:
        channel.rpc("exchange_delete", exchange=TOPICS, timeout=5.0)
    with pytest.raises(MachineryError, match=TOPICS):
        broker.broadcast("t", [b"2"], ttl=LONG)

    with_it = broker.subscribe("t")
    broker.broadcast("t", [b"3"], ttl=LONG)

    assert taken(with_it, 1) == [b"3"]
    with_it.close()


def test_records_of_others_are_handed_out(broker: AMQPBroker) -> None:
    subscription = broker.subscribe("t")
    odd = [
        pika.BasicProperties(),
        pika.BasicProperties(headers={"by": 1, "n": [True]}),
        pika.BasicProperties(expiration="60000", content_type="\x00", user_id=None),
    ]
    with broker.driver.visit("publishing") as channel:
        for number, properties in enumerate(odd):
            channel.raw.basic_publish(TOPICS, "t", b"%d" % number, properties)
        channel.rpc("basic_qos", prefetch_count=0, timeout=5.0)

    assert taken(subscription, len(odd)) == [b"%d" % number for number in range(len(odd))]
    subscription.close()
