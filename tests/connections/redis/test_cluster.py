"""Settings on a Redis Cluster: durability of each master, connections, keys and periods."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, State
from machinery_py.brokers.base import Broker
from machinery_py.brokers.redis.cluster import ClusterBroker
from machinery_py.config.sections import RedisConfig
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.pool import PoolLimits
from machinery_py.errors import BackendUnavailable, ConfigError, MachineryError, StoreUnusable
from machinery_py.tasks.signature import Signature
from machinery_py.testing.conformance.leases import put
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.servers import RedisCluster as ClusterServers

GOOD = {"appendonly": "yes", "maxmemory-policy": "noeviction"}
AS_IT_WAS = {"appendonly": "no", "maxmemory-policy": "noeviction"}
QUEUES = ("machinery_tasks", "mail", "video", "a", "b")  # in slots of all masters


@pytest.fixture
def durable(empty_cluster: ClusterServers) -> Iterator[ClusterServers]:
    """The shared cluster, with masters that keep what they are given."""
    nodes = empty_cluster.masters
    for node in nodes:
        for name, value in GOOD.items():
            node.cli("CONFIG", "SET", name, value)
    yield empty_cluster
    for node in empty_cluster.nodes:
        for name, value in AS_IT_WAS.items():
            node.cli("CONFIG", "SET", name, value)


def server_with(cluster: ClusterServers, **options: object) -> Server:
    return Server(Config(broker=cluster.url, redis=RedisConfig(**options)))  # type: ignore[arg-type]


def connections(cluster: ClusterServers, name: str) -> int:
    return sum(str(node.cli("CLIENT", "LIST")).count(f" name={name} ") for node in cluster.nodes)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.endswith("connections.redis.client")
    ]


def test_each_master_is_warned_of_once(
    durable: ClusterServers, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = durable.masters
    second.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    third.cli("CONFIG", "SET", "appendonly", "no")
    server = server_with(durable)
    server.register_task("note", lambda: None)

    with server.new_worker(concurrency=2, queues=QUEUES):
        together(
            4,
            lambda index: [
                server.send_task(Signature(name="note", routing_key=queue)) for queue in QUEUES
            ],
        )

    texts = sorted(warnings(caplog))
    assert [text.partition(": ")[0] for text in texts] == sorted(
        [f"Redis at 127.0.0.1:{second.port}", f"Redis at 127.0.0.1:{third.port}"]
    )
    for port, what in (
        (second.port, "maxmemory-policy is allkeys-lru"),
        (third.port, "it has no append-only file"),
    ):
        assert any(f":{port}: {what}" in text for text in texts)
        assert any(f"127.0.0.1:{port}: {what}" in one.text for one in server.broker.concerns())
        assert any(f"127.0.0.1:{port}: {what}" in one.text for one in server.backend.concerns())
    assert len(server.broker.concerns()) == 2
    assert not any(str(first.port) in one.text for one in server.broker.concerns())
    server.close()


def test_cluster_is_refused_when_one_master_would_lose_tasks(
    durable: ClusterServers, caplog: pytest.LogCaptureFixture
) -> None:
    strict = Server(Config(broker=durable.url, strict_durability=True))
    strict.send_task(Signature(name="nobody_runs_this"))
    assert strict.broker.concerns() == strict.backend.concerns() == []
    assert warnings(caplog) == []
    strict.close()

    for bad in durable.masters:  # whichever it is, and wherever a task would be stored
        bad.cli("CONFIG", "SET", "appendonly", "no")
        again = Server(Config(broker=durable.url, strict_durability=True))
        for queue in QUEUES:
            with pytest.raises(
                StoreUnusable, match=f"Redis at 127.0.0.1:{bad.port}: refused by strict_durability"
            ):
                again.send_task(Signature(name="nobody_runs_this", routing_key=queue))
        assert [one.waiting for one in server_with(durable).broker.stats()] == [1]
        again.close()
        bad.cli("CONFIG", "SET", "appendonly", "yes")


def test_delayed_tasks_of_go_are_under_the_key_that_was_chosen(
    empty_cluster: ClusterServers,
) -> None:
    key = "it's\\delayed ü"
    server = server_with(empty_cluster, delayed_tasks_key=key)
    answer = server.register_task("answer", lambda: 42)
    waits = answer.options(delay=3600.0).send()
    node = empty_cluster.node_of(key)
    (body,) = [message.body for message in server.broker.delayed(9)]
    soon = time.time_ns() + 300_000_000
    theirs = body.replace(waits.uuid.encode(), b"task_of_go")
    node.cli("ZADD", key, soon, theirs)
    node.cli("ZADD", key, soon + 3600 * 10**9, theirs.replace(b"task_of_go", b"task_of_later"))
    empty_cluster.node_of("delayed_tasks").cli("ZADD", "delayed_tasks", 1, b"not ours")

    assert len(server.broker.delayed(9)) == 3
    with server.new_worker(concurrency=1):
        wait_until(
            lambda: any(
                one.task_uuid == "task_of_go" for one in server.inspect.tasks(state=State.SUCCESS)
            ),
            HANG,
            "the end of Go's task",
        )
    assert node.cli("ZCARD", key) == 1
    assert server.broker.purge("machinery_tasks") == 2
    assert node.cli("EXISTS", key) == 0
    assert empty_cluster.node_of("delayed_tasks").cli("ZCARD", "delayed_tasks") == 1
    server.close()


@pytest.mark.parametrize("key", ["}", "a}{", "{}"])
def test_a_key_whose_slot_cannot_be_named_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="delayed_tasks_key"):
        Server(
            Config(
                broker="redis://127.0.0.1:1,127.0.0.1:2", redis=RedisConfig(delayed_tasks_key=key)
            )
        ).broker.stats()


def test_connections_to_all_nodes_are_counted_together(empty_cluster: ClusterServers) -> None:
    cluster = RedisClusterDriver(empty_cluster.url, limits=PoolLimits(max_active=2))
    drivers = [cluster.at(f"{{{queue}}}:".encode()) for queue in QUEUES]

    def ask(index: int) -> None:
        drivers[index].ask(b"EXISTS", f"{{{QUEUES[index]}}}".encode(), doing="asking")

    for index in range(len(QUEUES)):
        ask(index)  # an idle connection makes room for one to another node
    links = [drivers[0].open(), drivers[1].open()]

    with pytest.raises(
        BackendUnavailable,
        match=r"redis.max_active: 2 connections are in use \(raise it, or set redis.wait\)",
    ):
        cluster.timeout = 0.1
        ask(2)

    for link in links:
        link.close()
    ask(2)
    cluster.close()


def test_a_worker_runs_within_its_connections(empty_cluster: ClusterServers) -> None:
    server = server_with(empty_cluster, max_active=12, wait=True, client_name="few")
    double = server.register_task("double", lambda n: 2 * n)
    most: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            most.append(connections(empty_cluster, "few"))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        with server.new_worker(concurrency=4, queues=QUEUES[:3]):
            results = [
                double.options(queue=QUEUES[number % 3]).send(number) for number in range(60)
            ]
            assert [result.get(timeout=HANG) for result in results] == [
                2 * number for number in range(60)
            ]
    finally:
        over.set()
        looker.join(HANG)
    # The nodes are asked one after the other: one that moves between them is counted twice, once.
    lasting = [min(pair) for pair in itertools.pairwise(most)]
    assert 3 <= max(lasting) <= 12
    server.close()


@pytest.mark.parametrize("queues", [QUEUES[:1], QUEUES[:3]], ids=["one queue", "three"])
def test_a_shorter_poll_period_is_kept(
    empty_cluster: ClusterServers, queues: tuple[str, ...]
) -> None:
    server = server_with(empty_cluster, normal_tasks_poll_period=50)

    def sleeps() -> int:
        lines = [
            line
            for node in empty_cluster.masters
            for line in str(node.cli("INFO", "commandstats")).splitlines()
        ]
        return sum(
            int(line.partition("calls=")[2].partition(",")[0])
            for line in lines
            if "cmdstat_blmove:" in line
        )

    with server.new_worker(concurrency=1, queues=queues) as worker:
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
        before, began = sleeps(), time.monotonic()
        wait_until(lambda: sleeps() > before + 20, HANG, "twenty sleeps")
        assert time.monotonic() - began < 19.0  # with the default a second each
    server.close()


# Sleeping with several queues


@pytest.fixture
def broker(empty_cluster: ClusterServers) -> Iterator[ClusterBroker]:
    cluster = RedisClusterDriver(empty_cluster.url)
    yield ClusterBroker(cluster)
    cluster.close()


def blocked_clients(cluster: ClusterServers, queue: str) -> dict[str, set[str]]:
    """What is in the sets of a queue: v, w and u."""
    node = cluster.node_of(queue)
    return {name: set(node.cli("SMEMBERS", f"mpy:{{{queue}}}:{name}")) for name in "vwu"}  # type: ignore[arg-type]


def test_blocked_client_is_listed_at_all_its_queues_until_woken(
    empty_cluster: ClusterServers, broker: ClusterBroker
) -> None:
    consumer = broker.consume(["q", "r", "s"], worker="w")
    broker.pause("s")
    found: list[bytes] = []
    thread = threading.Thread(
        target=lambda: found.extend(one.body for one in consumer.receive(1, HANG))
    )
    thread.start()

    def lies() -> bool:
        return all(blocked_clients(empty_cluster, queue)["v"] for queue in ("q", "r"))

    wait_until(lies, HANG, "a blocked client that is listed at both open queues")
    put(broker, b"1", queue="r")
    thread.join(HANG)

    assert found == [b"1"]
    consumer.close()


def test_the_bed_is_left_when_its_queue_is_paused(
    empty_cluster: ClusterServers, broker: ClusterBroker
) -> None:
    consumer = broker.consume(["q", "r"], worker="w")
    found: list[bytes] = []
    thread = threading.Thread(
        target=lambda: found.extend(one.body for one in consumer.receive(1, HANG))
    )
    thread.start()
    wait_until(
        lambda: bool(blocked_clients(empty_cluster, "r")["w"]), HANG, "a blocked client at q"
    )
    broker.pause("q")
    put(broker, b"stays", queue="q")
    put(broker, b"1", queue="r")
    thread.join(HANG)

    assert found == [b"1"]
    assert [(one.queue, one.waiting, one.paused) for one in broker.stats()] == [
        ("q", 1, True),
        ("r", 0, False),
    ]
    assert broker.paused() == {"q"}
    broker.resume("q")
    assert [one.body for one in consumer.receive(1, HANG)] == [b"stays"]
    consumer.close()


def test_message_due_on_another_than_the_blocking_queue_comes(broker: ClusterBroker) -> None:
    consumer = broker.consume(["q", "r"], worker="w")
    due = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=0.3)
    _delay(broker, b"later", due)

    began = dt.datetime.now(dt.timezone.utc)
    assert [one.body for one in consumer.receive(1, HANG)] == [b"later"]
    assert dt.datetime.now(dt.timezone.utc) >= min(due, began)
    consumer.close()


def _delay(broker: Broker, body: bytes, due: dt.datetime) -> None:
    from machinery_py.brokers.base import Message

    broker.put([Message(uuid="", name="", queue="r", body=body, eta=due)], token="")


def test_worker_that_failed_to_register_on_one_node_is_on_none(
    empty_cluster: ClusterServers, broker: ClusterBroker
) -> None:
    empty_cluster.node_of("r").cli("SET", "mpy:{r}:mpy:queues", "not a set")

    with pytest.raises(MachineryError, match="registering a worker"):
        broker.consume(["q", "r"], worker="w")

    assert empty_cluster.node_of("q").cli("ZCARD", "mpy:{q}:s") == 0


def test_consumer_follows_a_slot_whose_move_is_known(
    empty_cluster: ClusterServers, broker: ClusterBroker
) -> None:
    source = empty_cluster.node_of("q")
    target = next(node for node in empty_cluster.masters if node is not source)
    consumer = broker.consume(["q"], worker="w")
    assert consumer.receive(1, 0.0) == []  # has a connection of its own to the source

    empty_cluster.move("q", target)
    try:
        put(broker, b"1", queue="q")  # refused once, and told where the slot is

        assert [one.body for one in consumer.receive(1, 0.0)] == [b"1"]
        consumer.close()
    finally:
        empty_cluster.move("q", source)
