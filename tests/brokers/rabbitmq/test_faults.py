"""Faults of RabbitMQ, network and other programs, with the numbers of the fault model."""

from __future__ import annotations

import datetime as dt
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from machinery_py import Config, Server, Signature
from machinery_py.brokers.base import Delivery, Disposal, Fate
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.consumer import AMQPConsumer
from machinery_py.brokers.rabbitmq.topology import LEVELS, Topology
from machinery_py.clock import SystemClock
from machinery_py.config.config import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.errors import (
    BrokerUnavailable,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.testing.conformance.leases import bodies, done, message, put
from machinery_py.testing.waiting import HANG, wait_until
from tests.stores.rabbitmq.case import waiting
from tests.support.proxy import REPLIES, Proxy
from tests.support.servers import RabbitMQServer, require

Open = Callable[..., AMQPBroker]


@pytest.fixture
def open_broker(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens brokers on a URL, by real time."""
    opened: list[AMQPBroker] = []

    def open_broker(
        url: str, *, timeout: float = 5.0, consumer_timeout: float = 1800.0, **config: object
    ) -> AMQPBroker:
        driver = AmqpDriver(url, clock=SystemClock(), timeout=timeout)
        topology = Topology(AMQPConfig(**config), "machinery_tasks")  # type: ignore[arg-type]  # as the test says
        opened.append(AMQPBroker(driver, topology, consumer_timeout=consumer_timeout))
        return opened[-1]

    yield open_broker
    for broker in opened:
        broker.close()
        broker.driver.close()


@pytest.fixture(scope="module")
def strict_server() -> Iterator[RabbitMQServer]:
    """Takes deliveries away after two seconds, and takes no large messages."""
    require(RabbitMQServer)
    with RabbitMQServer(config={"max_message_size": "1000000"}) as server:
        server.ctl("eval", "application:set_env(rabbit, consumer_timeout, 2000).")
        server.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 500).")
        yield server


def test_f60_publish_is_refused_in_time_while_memory_is_short(
    rabbitmq_server: RabbitMQServer, amqp_url: str, open_broker: Open
) -> None:
    broker = open_broker(amqp_url, timeout=1.0)
    put(broker, b"1", b"2")
    consumer = broker.consume(["q"], worker="w")
    try:
        rabbitmq_server.ctl("set_vm_memory_high_watermark", "absolute", "1")
        with pytest.raises((PublishUnknown, BrokerUnavailable)):
            put(broker, b"first")  # the server says that it is short when somebody publishes
        started = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="takes no messages at present: low on memory"):
            put(broker, b"second")
        with pytest.raises(BrokerUnavailable, match="it takes no messages: low on memory"):
            broker.broadcast("t", [b"x"], ttl=1.0)
        assert time.monotonic() - started < HANG

        one, two = consumer.receive(2, 5.0)
        assert consumer.dispose(done(one, two)) == [True, True]
        assert consumer.beat()
    finally:
        rabbitmq_server.ctl("set_vm_memory_high_watermark", "0.4")
    wait_until(lambda: not broker.driver.publisher.link.blocked, HANG)
    put(broker, b"third")
    assert b"third" in bodies(consumer.receive(5, 5.0))


def test_f61_unknown_delivery_tag_ends_only_the_connection(
    amqp_url: str, open_broker: Open
) -> None:
    broker = open_broker(amqp_url)
    put(broker, b"a")
    consumer = broker.consume(["q"], worker="w")
    (old,) = consumer.receive(1, 5.0)
    life = consumer._connection
    assert life is not None

    life.link.tell(lambda: life.main.raw.basic_ack(999))

    wait_until(lambda: consumer.holds([old]) == [False], HANG)
    assert consumer.dispose(done(old)) == [False]
    assert (consumer.beat(), consumer.beat()) == (False, True)
    (new,) = consumer.receive(1, 5.0)
    assert (new.body, new.strikes) == (b"a", 0)
    assert consumer.dispose(done(new)) == [True]


def test_f62_a_channel_that_the_server_takes_away_is_noticed_at_once(
    strict_server: RabbitMQServer, open_broker: Open
) -> None:
    broker = open_broker(strict_server.url)
    put(broker, b"taken away", queue="f62")
    consumer = broker.consume(["f62"], worker="w")
    (old,) = consumer.receive(1, 5.0)

    wait_until(lambda: consumer.holds([old]) == [False], HANG)

    assert consumer.beat() is False
    (new,) = consumer.receive(1, 5.0)
    assert consumer.dispose(done(old, new)) == [False, True]


@pytest.mark.parametrize(
    "end", ["done", "crash", *["dead", "back"] * bool(os.environ.get("MACHINERY_TEST_FULL"))]
)
def test_f62_a_task_may_run_longer_than_the_servers_timeout(
    strict_server: RabbitMQServer, open_broker: Open, end: str
) -> None:
    queue = f"long-{end}"
    broker = open_broker(strict_server.url, consumer_timeout=1.0)
    put(broker, b"long", queue=queue)
    consumer = broker.consume([queue], worker="w")
    (delivery,) = consumer.receive(1, 5.0)
    consumer.run_begins(delivery)
    started = time.monotonic()

    def beats() -> bool:
        assert consumer.beat()
        return time.monotonic() - started > 8.0  # four times what the server allows

    wait_until(beats, HANG)

    assert consumer.holds([delivery]) == [True]
    assert waiting(broker, queue) == 0
    if end == "crash":
        assert consumer._connection is not None
        consumer._connection.link.abort()
    else:
        fate = Fate[end.upper()]
        assert consumer.dispose([Disposal(delivery=delivery, fate=fate)]) == [True]
    found = broker.consume([queue], worker="heir").receive(
        5, 0.5 if end in ("done", "dead") else 5.0
    )
    assert [(one.body, one.strikes) for one in found] == {
        "done": [],
        "dead": [],
        "back": [(b"long", 0)],
        "crash": [(b"long", 1)],
    }[end]
    assert len(broker.dead_letters(limit=5, queue=queue)) == (end == "dead")


def test_f63_heartbeats_do_not_wait_for_users_of_the_broker(
    amqp_url: str, open_broker: Open
) -> None:
    broker = open_broker(f"{amqp_url}?heartbeat=1")
    put(broker, b"a")
    consumer = broker.consume(["q"], worker="w")
    (delivery,) = consumer.receive(1, 5.0)

    threading.Event().wait(5.0)  # nobody calls anything for more than two heartbeats

    assert consumer.dispose(done(delivery)) == [True]
    put(broker, b"b")


def test_f64_other_arguments_are_told_by_name(amqp_url: str, open_broker: Open) -> None:
    put(open_broker(amqp_url), b"a")
    other = open_broker(amqp_url, queue_declare_args={"x-max-priority": 10})

    with pytest.raises(PublishRefused, match=r"x-max-priority.*queue 'q'.*queue_declare_args"):
        put(other, b"b")
    with pytest.raises(StoreUnusable, match=r"x-max-priority.*queue 'q'"):
        other.consume(["q"], worker="w")
    with pytest.raises(PublishRefused, match=r"amq\."):
        put(other, b"b", queue="amq.mine")


def test_f65_queue_deleted_under_a_consumer_is_declared_again(
    amqp_url: str, open_broker: Open
) -> None:
    broker = open_broker(amqp_url)
    consumer = broker.consume(["q"], worker="w")

    def delete() -> None:
        with broker.driver.visit("deleting") as channel:
            channel.rpc("queue_delete", queue="q", timeout=HANG)

    deleter = threading.Thread(target=delete)
    deleter.start()
    with pytest.raises(MachineryError):
        while True:
            consumer.receive(1, 1.0)
    deleter.join()
    assert consumer.receive(1, 0.0) == []
    put(broker, b"a")
    assert bodies(consumer.receive(1, 5.0)) == [b"a"]


def test_f66_a_binding_that_was_deleted_is_made_anew(amqp_url: str, open_broker: Open) -> None:
    broker = open_broker(amqp_url)
    put(broker, b"1")
    with broker.driver.visit("unbinding") as channel:
        channel.rpc(
            "queue_unbind", queue="q", exchange="machinery_exchange", routing_key="q", timeout=HANG
        )

    put(broker, b"2", b"3")

    assert sorted(bodies(broker.consume(["q"], worker="w").receive(5, 5.0))) == [b"1", b"2", b"3"]


def test_f66_a_route_that_leads_nowhere_is_refused(amqp_url: str, open_broker: Open) -> None:
    broker = open_broker(amqp_url, exchange="topics", exchange_type="topic")

    with pytest.raises(
        PublishRefused, match=r"'topics' \(topic\) leads to no queue for the routing key 'nowhere'"
    ):
        put(broker, b"a", queue="nowhere")


def test_f67_a_full_queue_refuses(amqp_url: str, open_broker: Open) -> None:
    broker = open_broker(
        amqp_url, queue_declare_args={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    put(broker, b"1")

    with pytest.raises(PublishRefused, match="full"):
        put(broker, b"2")

    assert bodies(broker.consume(["q"], worker="w").receive(5, 5.0)) == [b"1"]


def test_f67_missing_confirm_is_unknown_until_the_repeat(
    rabbitmq_server: RabbitMQServer,
    amqp_url: str,
    open_broker: Open,
    open_proxy: Callable[[int], Proxy],
) -> None:
    proxy = open_proxy(rabbitmq_server.port)
    broker = open_broker(proxy.through(amqp_url), timeout=1.0)
    put(broker, b"1")
    proxy.black_hole(REPLIES)
    with pytest.raises(PublishUnknown, match="may or may not"):
        broker.put([message(b"2")], token="t")
    proxy.heal()

    assert broker.put([message(b"2")], token="t") is True
    assert broker.put([message(b"2")], token="t") is False

    found = bodies(broker.consume(["q"], worker="w").receive(5, 5.0))
    assert found[0] == b"1"
    assert set(found[1:]) == {b"2"}


def test_f68_confirmed_messages_survive_a_kill_of_the_server(open_broker: Open) -> None:
    require(RabbitMQServer)
    with RabbitMQServer() as server:
        broker = open_broker(server.url, timeout=3.0)
        late = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=2.0)
        accepted: list[bytes] = []
        stop = threading.Event()

        def publish() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                batch = [
                    message(b"%d.%d" % (number, part), eta=late if part == 9 else None)
                    for part in range(10)
                ]
                try:
                    broker.put(batch, token=f"t{number}")
                except MachineryError:
                    stop.wait(0.1)
                else:
                    accepted.extend(one.body for one in batch)

        publisher = threading.Thread(target=publish)
        publisher.start()
        wait_until(lambda: len(accepted) > 500, HANG)
        server.kill()
        server.start()
        count = len(accepted)
        wait_until(lambda: len(accepted) > count + 100, HANG)
        stop.set()
        publisher.join(HANG)

        consumer = broker.consume(["q"], worker="w")
        found: set[bytes] = set()

        def all_there() -> bool:
            deliveries = consumer.receive(1000, 0.5)
            consumer.dispose(done(*deliveries))
            found.update(bodies(deliveries))
            return found >= set(accepted)

        wait_until(all_there, HANG)


def test_f71_no_queue_for_tasks_expires() -> None:
    steps = [arguments for _, arguments in Topology(AMQPConfig(), "q").levels()]

    assert not [step for step in steps if "x-expires" in step.get("arguments", {})]
    assert sum("x-message-ttl" in step.get("arguments", {}) for step in steps) == LEVELS


def test_f72_a_short_delay_does_not_wait_behind_a_long_one(
    amqp_url: str, open_broker: Open
) -> None:
    broker = open_broker(amqp_url)
    consumer = broker.consume(["q"], worker="w")
    now = dt.datetime.now(dt.UTC)
    etas = {
        b"%d" % index: now + dt.timedelta(seconds=delay)
        for index, delay in enumerate((3600, 3.0, 0.3, 0.31, 1.5))
    }
    broker.put([message(body, eta=eta) for body, eta in etas.items()], token="")
    came: dict[bytes, dt.datetime] = {}

    def four_came() -> bool:
        for one in consumer.receive(1, 1.0):
            came[one.body] = dt.datetime.now(dt.UTC)
        return len(came) == 4

    wait_until(four_came, HANG)

    assert list(came)[-2:] == [b"4", b"1"]
    assert all(came[body] >= etas[body] for body in came)
    assert [one.body for one in broker.delayed(9)] == [b"0"]


def test_f73_unregistered_task_comes_back_after_growing_pauses(amqp_url: str) -> None:
    server = Server(Config(broker=amqp_url, result_backend="null"))
    moments: list[float] = []
    with server.new_worker("w", 1) as worker:
        session = worker._live.session
        assert session is not None
        receive = session.receive

        def noting(limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
            found = receive(limit, timeout, order)
            moments.extend(time.monotonic() for _ in found)
            return found

        session.receive = noting  # type: ignore[method-assign]
        server.send_task(Signature(name="unknown"))
        wait_until(lambda: len(moments) >= 3, HANG, "three deliveries")
    server.close()

    first, second, third = moments[:3]
    assert second - first >= 0.9
    assert third - second >= 1.9


def test_f74_message_too_large_for_the_server_is_refused(
    strict_server: RabbitMQServer, open_broker: Open
) -> None:
    broker = open_broker(strict_server.url)

    with pytest.raises(PublishRefused, match=r"1,100,000 bytes.*max_message_size"):
        put(broker, b"x" * 1_100_000, queue="f74")

    put(broker, b"small", queue="f74")
    assert bodies(broker.consume(["f74"], worker="w").receive(5, 5.0)) == [b"small"]


def test_a_wrong_password_is_told(rabbitmq_server: RabbitMQServer, open_broker: Open) -> None:
    broker = open_broker(rabbitmq_server.url.replace("guest:guest", "guest:wrong"))

    with pytest.raises(StoreUnusable, match="refuses user or password") as caught:
        broker.consume(["q"], worker="w")

    assert "wrong" not in str(caught.value)


def test_a_vhost_that_is_not_there_is_told(
    rabbitmq_server: RabbitMQServer, open_broker: Open
) -> None:
    with pytest.raises(MachineryError, match="vhost"):
        open_broker(f"{rabbitmq_server.url}nowhere").consume(["q"], worker="w")


def test_server_lost_during_the_greeting_is_not_a_wrong_password(
    rabbitmq_server: RabbitMQServer, open_broker: Open, open_proxy: Callable[[int], Proxy]
) -> None:
    """pika guesses a wrong password or vhost from its progress; those are for good, this is not."""
    proxy = open_proxy(rabbitmq_server.port)
    broker = open_broker(proxy.through(rabbitmq_server.url))
    told = set()
    for length in (1, 100, 400, *range(480, 560, 8)):
        proxy.reset_after(length)
        try:
            broker.driver.connect("test").close()
        except BrokerUnavailable:
            told.add(length)
        proxy.heal()

    assert {1, 100, 400} <= told


def test_no_server_is_told_in_time(open_broker: Open) -> None:
    broker = open_broker("amqp://127.0.0.1:1/", timeout=1.0)

    with pytest.raises(BrokerUnavailable, match="no connection to RabbitMQ"):
        put(broker, b"a")


def test_a_server_that_comes_back_is_used_again(open_broker: Open) -> None:
    require(RabbitMQServer)
    with RabbitMQServer() as server:
        broker = open_broker(server.url, timeout=2.0)
        put(broker, b"1")
        consumer: AMQPConsumer = broker.consume(["q"], worker="w")
        (old,) = consumer.receive(1, 5.0)
        server.stop()
        wait_until(lambda: consumer.holds([old]) == [False], HANG)
        with pytest.raises(BrokerUnavailable):
            consumer.receive(1, 0.0)
        with pytest.raises(BrokerUnavailable):
            put(broker, b"2")
        server.start()

        put(broker, b"3")
        assert consumer.beat() is False
        assert bodies(consumer.receive(5, 5.0)) == [b"1", b"3"]
        assert consumer.dispose(done(old)) == [False]


def test_connections_leave_nothing_behind(amqp_url: str, open_broker: Open) -> None:
    broker = open_broker(amqp_url)
    put(broker, b"1")

    def use() -> tuple[int, int]:
        broker.stats()
        consumer = broker.consume(["q"], worker="w")
        broker.workers()
        consumer.close()
        other = broker.consume(["q"], worker="w")
        assert other._connection is not None
        other._connection.link.abort()
        other.close()
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = use()
    for _ in range(3):
        use()
    wait_until(lambda: use() <= before, HANG)


def puts(broker: AMQPBroker, *bodies: bytes) -> bool:
    try:
        put(broker, *bodies)
    except PublishUnknown:
        return False
    return True


def test_another_url_is_used_when_a_server_is_gone() -> None:
    require(RabbitMQServer)
    with RabbitMQServer() as first, RabbitMQServer() as second:
        driver = AmqpDriver(first.url, second.url, timeout=3.0)
        broker = AMQPBroker(driver, Topology(AMQPConfig(), "machinery_tasks"))
        put(broker, b"left behind")
        consumer = broker.consume(["q"], worker="w")
        (old,) = consumer.receive(1, 5.0)

        first.kill()

        # A write may be the first to find the connection closed: the fate is unknown, so we resend.
        wait_until(lambda: puts(broker, b"1", b"2"), HANG, "messages that are stored")
        wait_until(lambda: consumer.holds([old]) == [False], HANG)
        assert consumer.beat() is False
        found = consumer.receive(5, 5.0)
        assert bodies(found) == [b"1", b"2"]
        assert consumer.dispose(done(old, *found)) == [False, True, True]
        assert driver.place == f"127.0.0.1:{second.port}"
        broker.close()
        driver.close()
