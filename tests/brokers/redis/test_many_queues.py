"""Workers of few queues among many: their cost, and queues without a worker are not forgotten."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from machinery_py.brokers.base import Broker, Message
from machinery_py.brokers.redis.broker import OTHERS, RedisBroker
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.brokers import OpenBroker
from tests.stores.redis.case import Drivers, ServerClock, clock, open_driver
from tests.stores.redis_cluster.case import InCluster
from tests.support.servers import RedisCluster as ClusterServers

__all__ = ["clock", "open_driver"]

QUEUES = 1_000
MOST = (
    25 * OTHERS
)  # commands of one look at OTHERS queues and the own ones; before, it was some for each of QUEUES


def calls(ask: Callable[[str, str], object]) -> int:
    """How many commands a server has carried out, those of scripts too."""
    text = ask("INFO", "commandstats")
    lines = (text.decode() if isinstance(text, bytes) else str(text)).splitlines()
    return sum(
        int(line.partition("calls=")[2].partition(",")[0]) for line in lines if "calls=" in line
    )


class ManyQueues(ABC):
    @pytest.fixture
    @abstractmethod
    def open_broker(self) -> OpenBroker: ...

    @abstractmethod
    def commands(self, broker: Broker) -> int:
        """All that were carried out until now."""

    @pytest.fixture
    def broker(self, open_broker: OpenBroker, clock: ManualClock) -> Broker:
        broker = open_broker()
        broker.put(
            [Message(uuid=f"task_{n}", name="n", queue=f"q{n}", body=b"x") for n in range(QUEUES)],
            token="",
        )
        return broker

    def test_cost_of_a_claim_does_not_grow_with_known_queues(self, broker: Broker) -> None:
        broker.consume(["q7"], worker="w")
        broker.tend()  # scripts are loaded, connections opened

        before = self.commands(broker)
        broker.tend()

        assert self.commands(broker) - before < MOST

    def test_deliveries_of_a_queue_without_workers_come_back(
        self, broker: Broker, open_broker: OpenBroker, clock: ManualClock
    ) -> None:
        """Its queue is looked at in its turn, and once more to judge."""
        dead = open_broker().consume(["q123"], worker="dead")
        assert len(dead.receive(1, 0.0)) == 1
        broker.consume(["q7"], worker="w")

        for _ in range(2 * QUEUES // OTHERS):
            clock.advance(2.5)
            broker.tend()

        assert len(broker.pending("q123", 9)) == 1

    def test_a_worker_tends_its_own_queues_at_each_look(
        self, broker: Broker, open_broker: OpenBroker, clock: ManualClock
    ) -> None:
        dead = open_broker().consume(["q123"], worker="dead")
        assert len(dead.receive(1, 0.0)) == 1
        broker.consume(["q7", "q123"], worker="w")

        clock.advance(11.0)
        broker.tend()
        clock.advance(5.0)
        broker.tend()
        assert broker.pending("q123", 9) == []  # after an outage it may beat yet
        clock.advance(2.5)
        broker.tend()

        assert len(broker.pending("q123", 9)) == 1


class TestManyQueuesInRedis(ManyQueues):
    @pytest.fixture
    def clock(self, redis_url: str) -> ServerClock:
        return ServerClock(redis_url)

    @pytest.fixture
    def open_broker(self, open_driver: Drivers) -> OpenBroker:
        return lambda: RedisBroker(open_driver())

    def commands(self, broker: Broker) -> int:
        assert isinstance(broker, RedisBroker)
        return calls(lambda *words: broker.driver.ask(*map(str.encode, words), doing="testing"))


class TestManyQueuesInACluster(InCluster, TestManyQueuesInRedis):
    @pytest.fixture(autouse=True)
    def all_masters(self, empty_cluster: ClusterServers) -> None:
        self.servers = empty_cluster

    def commands(self, broker: Broker) -> int:
        return sum(calls(node.cli) for node in self.servers.masters)
