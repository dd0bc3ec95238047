"""Deliveries held over RabbitMQ: their loss, their counting, and what claims need inside pika."""

from __future__ import annotations

import datetime as dt
import inspect
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pika.channel
import pytest

from machinery_py import Config, Server, current_task
from machinery_py.brokers.base import Consumer, Delivery
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.consumer import AMQPConsumer
from machinery_py.brokers.rabbitmq.fetch import Fetch
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.config.config import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.io_thread import Channel
from machinery_py.stores.outbox import TwoSession
from machinery_py.testing.conformance.leases import bodies, message, put
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.lease import WorkerLease
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.executors import Executors
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.runner import Run
from tests.stores.rabbitmq.case import waiting

LONG_LEASE = 2400.0  # seconds; a beat each quarter of it: nothing here is found out by a beat


@pytest.fixture
def broker(amqp_url: str) -> Iterator[AMQPBroker]:
    driver = AmqpDriver(amqp_url, timeout=20.0)
    broker = AMQPBroker(driver, Topology(AMQPConfig(), "machinery_tasks"))
    yield broker
    broker.close()
    driver.close()


@pytest.fixture
def server(amqp_url: str) -> Iterator[Server]:
    server = Server(Config(broker=amqp_url, result_backend="memory://amqp-hold", lease=LONG_LEASE))
    yield server
    server.close()


def consumer_of(session: object) -> AMQPConsumer:
    assert isinstance(session, TwoSession)
    assert isinstance(session.consumer, AMQPConsumer)
    return session.consumer


def break_connection(consumer: AMQPConsumer) -> None:
    assert consumer._connection is not None
    consumer._connection.link.abort()


# Lost deliveries


def test_task_not_begun_at_a_connection_loss_does_not_begin(server: Server) -> None:
    gate, runs = threading.Event(), list[int]()

    @server.task("work")
    def work(number: int) -> None:
        runs.append(number)
        gate.wait(HANG)

    for number in range(3):
        work.send(number)
    session = server.app.store.open_session(["machinery_tasks"], worker="w")
    told: list[Execution] = []
    lease = WorkerLease(session, 10.0)
    executors = Executors(
        1, session, name="w", lease=lease, on_done=told.append, on_mark=lambda _: None
    )
    deliveries = session.receive(3, HANG)
    while len(deliveries) < 3:
        deliveries += session.receive(3 - len(deliveries), HANG)
    for delivery in deliveries:
        execution = Execution(server.app, WorkerHooks(), delivery, "w")
        assert peek(execution)
        assert accept(execution, {})
        executors.submit(Run(execution))
    wait_until(lambda: runs == [0], HANG, "the first task")

    break_connection(consumer_of(session))
    gate.set()

    wait_until(lambda: len(told) == 3, HANG, "all to be over")
    executors.close()
    assert runs == [0]
    assert all(session.consumer.is_lost(one.delivery) for one in told)
    assert {one.is_over for one in told} == {True}
    session.close()


def test_task_with_a_lost_lease_is_cancelled_at_once(server: Server) -> None:
    started = Counter[bool]()

    @server.task("stubborn")
    def stubborn() -> str:
        task = current_task()
        started[task.is_redelivery] += 1
        if not task.is_redelivery:
            wait_until(lambda: task.cancelled, 2 * HANG, "to be asked to stop")
        return "stopped"

    with server.new_worker("w", 1) as worker:
        result = stubborn.send()
        wait_until(lambda: started[False], HANG, "a run")

        break_connection(consumer_of(worker._live.session))

        assert result.get(timeout=HANG) == "stopped"
    assert started[False] == 1


def test_the_fence_grows_with_each_delivery_and_each_run(server: Server) -> None:
    fences, again = list[int](), list[bool]()

    @server.task("fenced", retries=1, backoff=lambda _: 0.0)
    def fenced() -> None:
        fences.append(current_task().fence)
        again.append(current_task().is_redelivery)
        if len(fences) == 1:
            wait_until(lambda: len(fences) > 1, 2 * HANG, "the second delivery")
        elif len(fences) == 2:
            raise ValueError("once more")

    with server.new_worker("w", 2) as worker:
        result = fenced.send()
        wait_until(lambda: len(fences) == 1, HANG, "the first delivery")
        break_connection(consumer_of(worker._live.session))
        wait_until(lambda: len(fences) == 3, HANG, "the retry")
        assert result.get(timeout=HANG) is None

    assert again == [False, True, False]
    assert fences[0] < fences[1] < fences[2]


def test_delivery_held_but_not_begun_returns_without_a_strike(
    broker: AMQPBroker,
) -> None:
    put(broker, b"held", b"runs")
    dying = broker.consume(["q"], worker="dies")
    assert isinstance(dying, AMQPConsumer)
    found = both_of(dying)
    dying.run_begins(next(one for one in found if one.body == b"runs"))
    dying._hold_for = 0.0

    dying.beat()  # holds both in another queue from now on
    break_connection(dying)

    back = both_of(broker.consume(["q"], worker="heir"))
    assert sorted((one.body, one.strikes) for one in back) == [(b"held", 0), (b"runs", 1)]


def both_of(consumer: Consumer) -> list[Delivery]:
    found: list[Delivery] = []
    while len(found) < 2:
        found += consumer.receive(2 - len(found), HANG)
    return found


# pika's inside


def test_internals_of_pika_that_are_used_exist(broker: AMQPBroker) -> None:
    """pika cannot publicly end a subscription without rejecting, nor drop a dead connection."""
    parameters = list(inspect.signature(pika.channel.Channel._rpc).parameters)
    assert parameters == ["self", "method", "callback", "acceptable_replies"]
    with broker.driver.visit("looking") as channel:
        assert isinstance(channel.raw._consumers, dict)
        assert callable(channel.link._connection._transport.abort)  # type: ignore[union-attr]


class Public:
    """A channel of pika's without its private methods."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._raw, name)


@pytest.mark.parametrize("public", [False, True], ids=["pika's inside", "pika's public methods"])
def test_a_claim_takes_what_it_wants_and_leaves_the_others(
    broker: AMQPBroker, public: bool
) -> None:
    put(broker, *(b"%d" % number for number in range(300)))
    redelivered = taken = 0
    with broker.driver.visit("claiming") as channel:
        if public:
            channel.raw = Public(channel.raw)
        while taken < 300:
            found = Fetch(channel, ["q"], 7, HANG).run(HANG)
            assert 0 < len(found) <= 7
            redelivered += sum(one.redelivered for one in found)
            for one in found:
                channel.link.tell(lambda tag=one.tag: channel.raw.basic_ack(tag))  # type: ignore[misc]
            taken += len(found)
    assert waiting(broker, "q") == 0
    assert public or redelivered == 0


def test_delivery_during_an_unsubscribe_is_taken_as_new(
    broker: AMQPBroker,
) -> None:
    """One message is wanted; many are on their way when the first has ended the subscription."""
    put(broker, *(b"%d" % number for number in range(200)))
    with broker.driver.visit("claiming") as channel:
        claim = Fetch(channel, ["q"], 100, HANG)
        claim.end()  # as soon as it has begun
        found = claim.run(HANG)
        assert not any(one.redelivered for one in found)
        rest = _all(channel)
        assert len(found) + len(rest) == 200
        assert not any(one.redelivered for one in rest)


def _all(channel: Channel) -> list[Any]:
    found: list[Any] = []
    while more := Fetch(channel, ["q"], 200, 0.0).run(HANG):
        found += more
    return found


# Counting


def late(queue: str, body: bytes = b"late", *, hours: int = 1) -> Any:
    return message(body, queue=queue, eta=dt.datetime.now(dt.UTC) + dt.timedelta(hours=hours))


def counted(broker: AMQPBroker) -> dict[str, tuple[int, int]]:
    return {line.queue: (line.waiting, line.delayed) for line in broker.stats()}


def test_counting_delayed_messages_of_one_queue_takes_none(broker: AMQPBroker) -> None:
    put(broker, b"1", b"2")
    put(broker, b"3", queue="r")
    broker.put([late("r"), late("r", hours=2)], token="")

    assert counted(broker) == {"q": (2, 0), "r": (1, 2)}

    assert broker._split.until == 0.0  # it has read nothing
    (first, second) = broker.consume(["q"], worker="w").receive(2, HANG)
    assert (first.strikes, second.strikes) == (0, 0)


def test_owners_of_delayed_messages_are_read_after_a_change(
    broker: AMQPBroker,
) -> None:
    broker.put([late("q"), late("q"), late("r", hours=5)], token="")

    assert counted(broker) == {"q": (0, 2), "r": (0, 1)}
    first = broker._split.by_queue
    assert counted(broker) == {"q": (0, 2), "r": (0, 1)}
    assert broker._split.by_queue is first
    broker.put([late("r", hours=5)], token="")
    assert counted(broker) == {"q": (0, 2), "r": (0, 2)}

    assert sorted(bodies(broker.delayed(9))) == [b"late"] * 4  # type: ignore[arg-type]  # they have bodies


def test_many_delayed_messages_are_counted_by_a_sample(
    broker: AMQPBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("machinery_py.brokers.rabbitmq.inspect.SAMPLE", 10)
    moment = dt.datetime.now(dt.UTC) + dt.timedelta(hours=3)
    broker.put(
        [message(b"%d" % number, queue="qr"[number % 2], eta=moment) for number in range(40)],
        token="",
    )

    assert counted(broker) == {"q": (0, 20), "r": (0, 20)}
    assert len(broker.delayed(99)) == 40
