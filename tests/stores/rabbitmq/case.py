"""A vhost for each test, and a clock that waits for delayed messages, for the RabbitMQ stores."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator

import pytest

from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.consumer import AMQPConsumer
from machinery_py.brokers.rabbitmq.topology import LEVELS, Topology
from machinery_py.config.config import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG, wait_until

PACE = 4  # the servers' seconds in one real second, where messages are delayed


class PacedClock(ManualClock):
    """Stands still, and takes its real time to go on while a message is delayed on the server."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._until: dt.datetime | None = None
        self._noting = threading.Lock()

    def delayed_for(self, delay: float) -> None:
        with self._noting:
            eta = self.now() + dt.timedelta(seconds=delay)
            self._until = max(eta, self._until or eta)

    def advance(self, seconds: float = 0.0, **more: float) -> None:
        before = self.now()
        super().advance(seconds, **more)
        if self._until is not None and before < self._until:
            passed = min(self.now(), self._until) - before
            threading.Event().wait(passed.total_seconds() / PACE)
            if self.now() >= self._until:
                # All are due: their way through the levels takes as long as the machine is slow.
                wait_until(lambda: not late(self._url), HANG)


class HurriedTopology(Topology):
    """Delays pass PACE times as fast, and the clock hears of them."""

    def __init__(self, config: AMQPConfig, clock: PacedClock) -> None:
        super().__init__(config, "machinery_tasks")
        self._clock = clock

    def ttl(self, level: int) -> int:
        return max(1, super().ttl(level) // PACE)

    def delay_route(self, queue: str, delay: float) -> tuple[str, str]:
        self._clock.delayed_for(delay)
        return super().delay_route(queue, delay)


class Brokers:
    """Each call opens connections of its own, as another process would."""

    def __init__(self, url: str, clock: PacedClock, config: AMQPConfig) -> None:
        self.url = url
        self.config = config
        self._clock = clock
        self._open: list[AMQPBroker] = []

    def __call__(self) -> AMQPBroker:
        broker = AMQPBroker(
            AmqpDriver(self.url, clock=self._clock), HurriedTopology(self.config, self._clock)
        )
        self._open.append(broker)
        return broker

    def close(self) -> None:
        for broker in self._open:
            broker.close()
            broker.driver.close()


def crash(broker: AMQPBroker, consumer: AMQPConsumer) -> None:
    """Break the consumer's connection, as a kill does; return when its messages are back."""
    held: dict[str, int] = {}
    for one in list(consumer._held.values()):
        held[one.delivery.queue] = held.get(one.delivery.queue, 0) + 1
    before = {queue: waiting(broker, queue) for queue in held}
    life = consumer._connection
    assert life is not None
    life.link.abort()
    for queue, count in held.items():
        wait_until(
            lambda queue=queue, count=count: waiting(broker, queue) >= before[queue] + count, HANG
        )


def late(url: str) -> int:
    """How many messages are in the levels."""
    with AmqpDriver(url).visit("counting") as channel:
        names = [
            HurriedTopology(AMQPConfig(), PacedClock(url)).level_name(level)
            for level in range(LEVELS)
        ]
        frames = [
            channel.rpc("queue_declare", queue=name, passive=True, timeout=HANG) for name in names
        ]
        return sum(frame.method.message_count for frame in frames)


def waiting(broker: AMQPBroker, queue: str) -> int:
    """How many messages wait in a queue, without a look into it."""
    with broker.driver.visit("counting") as channel:
        frame = channel.rpc("queue_declare", queue=queue, passive=True, timeout=HANG)
        return int(frame.method.message_count)


@pytest.fixture
def clock(amqp_url: str) -> PacedClock:
    return PacedClock(amqp_url)


@pytest.fixture
def amqp_config() -> AMQPConfig:
    return AMQPConfig()


@pytest.fixture
def open_brokers(amqp_url: str, clock: PacedClock, amqp_config: AMQPConfig) -> Iterator[Brokers]:
    brokers = Brokers(amqp_url, clock, amqp_config)
    yield brokers
    brokers.close()
