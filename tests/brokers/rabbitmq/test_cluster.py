"""A cluster of three RabbitMQ nodes.

Quorum queues whose leader dies, moves or is alone; classic queues of a dead node.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, State, Task
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.config.sections import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.errors import BrokerUnavailable, PublishRefused, PublishUnknown
from machinery_py.events import TaskSucceeded
from machinery_py.testing.conformance.leases import bodies, message, put
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import RabbitMQCluster, RabbitMQServer, RedisServer, require

TASKS = 300  # and so many more after the fault
LONG = 4 * HANG  # a guard: at a load of 25 an election takes its time
QUORUM = AMQPConfig(queue_declare_args={"x-queue-type": "quorum"})


@pytest.fixture(scope="module")
def nodes() -> Iterator[RabbitMQCluster]:
    require(RabbitMQCluster)
    with RabbitMQCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes: RabbitMQCluster) -> Iterator[RabbitMQCluster]:
    """All three run when the test begins, and a test that stopped one harms nobody after it."""
    yield nodes
    for node in nodes.nodes:
        node.start()
        node.thaw()
    wait_until(
        lambda: all(node.ctl("eval", "length(nodes()).").strip() == "2" for node in nodes.nodes),
        LONG,
        "three nodes",
    )


class Load:
    """A thread that sends tasks until told to end; `accepted` has those confirmed as stored."""

    def __init__(self, server: Server, task: Task[[int], int]) -> None:
        self._server = server
        self._task = task
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="load", daemon=True)
        self.accepted: set[str] = set()
        self.refused = 0  # batches of which nobody has promised anything
        self.failure: BaseException | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LONG)
        if self.failure is not None:
            raise self.failure

    def more(self, count: int) -> None:
        """Wait until so many more are accepted."""
        goal = len(self.accepted) + count
        wait_until(lambda: len(self.accepted) >= goal or self.failure, LONG, f"{count} more tasks")

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                batch = [self._task.signature(number).with_uuid() for number in range(10)]
                try:
                    self._server.app.submit(batch)
                except (PublishRefused, PublishUnknown):
                    self.refused += 1
                    continue
                self.accepted.update(one.uuid for one in batch)
        except BaseException as error:  # for the test, which has another thread
            self.failure = error


class Scene:
    """A server with a task over the cluster, and how often each of its tasks was settled."""

    def __init__(self, cluster: RabbitMQCluster, redis: RedisServer) -> None:
        self.server = Server(
            Config(
                broker=cluster.url,
                multiple_broker_separator=";",
                result_backend=redis.url,
                publish_timeout=2.0,
                amqp=QUORUM,
            )
        )
        self.settled: collections.Counter[str] = collections.Counter()
        self.work = self.server.register_task("work", _same)
        self.server.events.subscribe(
            TaskSucceeded, lambda event: self.settled.update([event.signature.uuid])
        )
        self.first = self.work.send(0).uuid  # makes the queue

    def is_over(self, accepted: set[str]) -> bool:
        states = self.server.backend.get_states(list(accepted))
        return len(states) == len(accepted) and all(
            one.state is State.SUCCESS for one in states.values()
        )

    def check(self, accepted: set[str]) -> None:
        """Every accepted task succeeds, once."""
        wait_until(lambda: self.is_over(accepted), LONG, "every accepted task to succeed")
        # The last verdicts are told a moment after the states can be read.
        wait_until(
            lambda: set(self.settled) >= accepted | {self.first},
            LONG,
            "every settlement to be told",
        )
        assert set(self.settled.values()) == {1}


def _same(number: int) -> int:
    return number


@pytest.fixture
def scene(cluster: RabbitMQCluster, empty_redis: RedisServer) -> Iterator[Scene]:
    scene = Scene(cluster, empty_redis)
    yield scene
    scene.server.close()


@pytest.mark.timeout(6 * LONG)
def test_f69_a_quorum_queue_outlives_its_leader_under_load(
    cluster: RabbitMQCluster, scene: Scene
) -> None:
    leader = cluster.leader_of("machinery_tasks")
    with scene.server.new_worker("one", 2), scene.server.new_worker("two", 2):
        with Load(scene.server, scene.work) as load:
            load.more(TASKS)
            leader.kill()
            load.more(TASKS)

        # The dead node stays dead: what the workers held of it is not waited for.
        scene.check(load.accepted)


@pytest.mark.timeout(6 * LONG)
def test_f69_a_leader_that_moves_is_followed(cluster: RabbitMQCluster, scene: Scene) -> None:
    with scene.server.new_worker("one", 2), scene.server.new_worker("two", 2):
        with Load(scene.server, scene.work) as load:
            load.more(TASKS)
            move_leader(cluster, "machinery_tasks")
            load.more(TASKS)

        scene.check(load.accepted)


def test_a_classic_queue_whose_node_is_down_is_waited_for(cluster: RabbitMQCluster) -> None:
    """Not a wrong declaration: it passes when the node is back."""
    home, other = cluster.nodes[1], cluster.nodes[2]
    with_home = opened(home)
    put(with_home, b"1")
    with_home.close()
    with_home.driver.close()
    broker = opened(other)
    put(broker, b"2")

    home.kill()

    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=r"down or inaccessible|leads to no queue"):
            put(broker, b"3")
        with pytest.raises(BrokerUnavailable, match="down or inaccessible"):
            broker.consume(["q"], worker="w")
        with pytest.raises(BrokerUnavailable):
            broker.stats()
    home.start()
    wait_until(lambda: is_put(broker, b"4"), LONG, "a message that is taken")
    found = broker.consume(["q"], worker="w").receive(9, HANG)
    assert bodies(found)[:2] == [b"1", b"2"]
    assert bodies(found)[-1] == b"4"
    broker.close()
    broker.driver.close()


@pytest.mark.timeout(6 * LONG)
def test_f69_minority_accepts_nothing_until_the_majority_is_back(
    cluster: RabbitMQCluster, scene: Scene
) -> None:
    with scene.server.new_worker("one", 2), scene.server.new_worker("two", 2):
        with Load(scene.server, scene.work) as load:
            load.more(TASKS)
            for node in cluster.nodes[1:]:
                node.freeze()
            refused = load.refused
            wait_until(lambda: load.refused > refused + 1, LONG, "refusals")
            before = len(load.accepted)
            wait_until(lambda: load.refused > refused + 2, LONG, "another refusal")
            assert len(load.accepted) == before
            for node in cluster.nodes[1:]:
                node.thaw()
            load.more(TASKS)

        scene.check(load.accepted)


def opened(node: RabbitMQServer) -> AMQPBroker:
    return AMQPBroker(AmqpDriver(node.url, timeout=10.0), Topology(AMQPConfig(), "machinery_tasks"))


def is_put(broker: AMQPBroker, body: bytes) -> bool:
    try:
        broker.put([message(body)], token="")
    except PublishRefused:
        return False
    return True


def move_leader(cluster: RabbitMQCluster, queue: str) -> None:
    """Let another node lead.

    A node that lags behind may lose the election after it was asked, so it is asked again.
    """
    before = cluster.leader_of(queue)

    def moved() -> bool:
        if cluster.leader_of(queue) is before:
            before.ctl(
                "eval",
                f"""
                {{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)),
                {{Name, Leader}} = amqqueue:get_pid(Q),
                [Other | _] = [Node || Node <- [node() | nodes()], Node =/= Leader],
                ra:transfer_leadership({{Name, Leader}}, {{Name, Other}}).
            """,
            )
        return cluster.leader_of(queue) is not before

    wait_until(moved, LONG, "another leader")
