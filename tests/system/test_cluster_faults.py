"""A Redis Cluster whose slots move and whose masters die while workers run."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from machinery_py import Config, Server, State, chord, current_task, group
from machinery_py.brokers.base import Message
from machinery_py.brokers.redis.cluster import ClusterBroker
from machinery_py.config.sections import RedisConfig
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.slots import slot_of
from machinery_py.errors import MachineryError
from machinery_py.events import ConnectionLost
from machinery_py.testing.waiting import wait_until
from tests.support.servers import RedisCluster, RedisServer, require

HANG = 60.0  # seconds; a guard, nothing is measured with it
QUEUES = ("machinery_tasks", "mail", "video")


class Ran:
    """How often each task has run, and a gate that some wait for."""

    def __init__(self, server: Server) -> None:
        self.runs: Counter[str] = Counter()
        self.gate = threading.Event()
        self.add = server.register_task("add", self._add)
        self.total = server.register_task("total", self._total)
        self.wait = server.register_task("wait", self._wait)

    def _add(self, a: int, b: int) -> int:
        self.runs[current_task().uuid] += 1
        return a + b

    def _total(self, *numbers: int) -> int:
        self.runs[current_task().uuid] += 1
        return sum(numbers)

    def _wait(self, number: int) -> int:
        self.runs[current_task().uuid] += 1
        if not self.gate.wait(HANG):
            raise TimeoutError("nobody opened the gate")
        return number


@pytest.fixture
def server(empty_cluster: RedisCluster) -> Iterator[Server]:
    server = Server(Config(broker=empty_cluster.url, publish_timeout=20.0))
    yield server
    server.close()


@contextmanager
def moving(cluster: RedisCluster, keys: list[str]) -> Iterator[Counter[str]]:
    """Move these keys' slots between masters in turn during the block; yield the moves."""
    over = threading.Event()
    moves: Counter[str] = Counter()
    failures: list[Exception] = []

    def run() -> None:
        try:
            while not over.is_set():
                for key in keys:
                    nodes = cluster.masters
                    source = cluster.node_of(key)
                    cluster.move(key, next(node for node in nodes if node is not source), at_once=2)
                    moves[key] += 1
        except Exception as error:  # told in the test's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="moving slots")
    thread.start()
    try:
        yield moves
    finally:
        over.set()
        thread.join()
    assert not failures


def test_slots_that_move_lose_and_double_nothing(
    empty_cluster: RedisCluster, server: Server
) -> None:
    ran = Ran(server)
    sent = [
        ran.add.options(queue=QUEUES[n % 3]).signature(n, 1).replace(uuid=f"task_{n}")
        for n in range(60)
    ]
    keys = [
        *QUEUES,
        "mpy:queues",
        "mpy:ready",
        "mpy:groups",
        "mpy:{list0}:open",
        *(one.uuid for one in sent[:8]),
    ]

    with (
        moving(empty_cluster, keys) as moves,
        server.new_worker(queues=list(QUEUES), concurrency=4),
    ):
        results = [server.send(one) for one in sent]
        callbacks = [
            server.send(
                chord(group(ran.add.signature(n, k) for k in range(4)), ran.total.partial())
            )
            for n in range(5)
        ]
        late = [ran.add.options(delay=0.2).send(n, 1) for n in range(5)]
        assert [one.get(timeout=HANG) for one in results] == [n + 1 for n in range(60)]
        assert [one.get(timeout=HANG) for one in callbacks] == [4 * n + 6 for n in range(5)]
        assert [one.get(timeout=HANG) for one in late] == [n + 1 for n in range(5)]
        wait_until(lambda: all(moves[key] for key in keys), HANG, "each slot to have moved")
        more = [ran.add.options(queue=queue).send(1, 1) for queue in QUEUES]
        assert [one.get(timeout=HANG) for one in more] == [2, 2, 2]

    assert len(ran.runs) == 60 + 5 * 5 + 5 + 3
    assert set(ran.runs.values()) == {1}
    assert not server.inspect.dead()
    assert not any(one.waiting + one.delayed + one.running for one in server.inspect.queues())


@pytest.fixture
def mortal_cluster() -> Iterator[RedisCluster]:
    """One of its own: a master that was killed comes back as a replica."""
    require(RedisCluster)
    with RedisCluster() as cluster:
        yield cluster


def catch_up(cluster: RedisCluster) -> None:
    """Wait until each replica has all that its master has taken by now.

    A busy worker goes on beating: the two may never be equal.
    """
    wanted = {node: _offsets(node)[0] for node in cluster.masters}
    wait_until(
        lambda: all(_offsets(node)[1] >= least for node, least in wanted.items()),
        HANG,
        "replicas that know all",
    )


def _offsets(master: RedisServer) -> tuple[int, int]:
    """What the master has written, and what its replica has said to have (-1: there is none)."""
    text = str(master.cli("INFO", "replication"))
    own, replica = (
        re.search(rf"\b{word}(\d+)", text) for word in ("master_repl_offset:", "offset=")
    )
    assert own, text
    return int(own[1]), int(replica[1]) if replica else -1


def test_replicated_tasks_survive_their_master(mortal_cluster: RedisCluster) -> None:
    cluster = mortal_cluster
    server = Server(Config(broker=cluster.url, publish_timeout=20.0))
    ran = Ran(server)
    result = server.send(chord(group(ran.wait.signature(n) for n in range(6)), ran.total.partial()))
    waiting = [ran.add.send(n, 1) for n in range(30)]
    try:
        with server.new_worker(queues=list(QUEUES), concurrency=4):
            wait_until(lambda: len(ran.runs) == 4, HANG, "the worker to be busy")
            catch_up(cluster)
            owner = cluster.node_of("machinery_tasks")
            owner.kill()
            ran.gate.set()
            waiting += [ran.add.options(queue=QUEUES[n % 3]).send(n, 1) for n in range(30, 36)]

            assert result.get(timeout=HANG) == sum(range(6))
            assert [one.get(timeout=HANG) for one in waiting] == [n + 1 for n in range(36)]
            assert cluster.node_of("machinery_tasks") is not owner

        assert [uuid for uuid in ran.runs if uuid == result.uuid] == [result.uuid]
        assert ran.runs[result.uuid] == 1
        assert len(ran.runs) == 6 + 1 + 36
        states = server.inspect.tasks(limit=100)
        assert {one.state for one in states} == {State.SUCCESS}
        assert len(states) == 43
        assert not server.inspect.dead()
    finally:
        ran.gate.set()
        server.close()


def test_one_host_of_a_cluster_is_enough(empty_cluster: RedisCluster) -> None:
    server = Server(Config(broker=empty_cluster.nodes[0].url, redis=RedisConfig(cluster_mode=True)))
    ran = Ran(server)

    with server.new_worker(queues=list(QUEUES), concurrency=2):
        results = [ran.add.options(queue=queue).send(1, 2) for queue in QUEUES]
        assert [one.get(timeout=HANG) for one in results] == [3, 3, 3]

    assert len({empty_cluster.node_of(queue).port for queue in QUEUES}) > 1
    server.close()


def test_each_key_is_in_gos_slot_or_in_the_slot_of_its_tag(
    empty_cluster: RedisCluster, server: Server
) -> None:
    ran = Ran(server)
    result = server.send(
        chord(group(ran.add.signature(n, 1) for n in range(3)), ran.total.partial())
    )
    ran.add.options(delay=3600).send(1, 2)
    waiting = ran.add.options(queue="mail").send(1, 2)
    with server.new_worker(concurrency=2):
        assert result.get(timeout=HANG) == 6

    keys = {key for node in empty_cluster.masters for key in node.cli("KEYS", "*")}  # type: ignore[union-attr]
    assert {"mail", "mpy:queues", waiting.uuid, result.uuid} <= keys
    # A script that forgot to name a key's slot would have written one of these.
    assert not {
        key
        for key in keys
        if str(key).startswith(("mpy:p:", "mpy:open", "mpy:done", "mpy:rate", "mpy:outbox"))
    }
    assert "delayed_tasks" not in keys
    for key in keys:
        assert empty_cluster.nodes[0].cli("CLUSTER", "KEYSLOT", str(key)) == slot_of(
            str(key).encode()
        )


def test_worker_started_before_its_cluster_waits(mortal_cluster: RedisCluster) -> None:
    cluster = mortal_cluster
    for node in cluster.nodes:
        node.stop()
    server = Server(Config(broker=cluster.url, publish_timeout=1.0))
    add = server.register_task("add", lambda a, b: a + b)
    worker = server.new_worker(concurrency=1, queues=QUEUES)
    lost: list[str] = []

    @worker.set_connection_error_handler
    def at_once(event: ConnectionLost) -> float:
        lost.append(event.error)
        return 0.05

    failures: list[BaseException] = []
    thread = worker.launch_async(failures.append)
    try:
        wait_until(lambda: len(lost) > 2, HANG, "three attempts")
        assert not worker.ready
        cluster.start()
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
        patient = Server(Config(broker=cluster.url, publish_timeout=20.0))
        sent = [patient.send(add.options(queue=queue).signature(1, 2)) for queue in QUEUES]
        assert [one.get(timeout=HANG) for one in sent] == [3, 3, 3]
        patient.close()
    finally:
        worker.quit()
        thread.join(HANG)
    assert not thread.is_alive()
    assert all("cluster 127.0.0.1" in error for error in lost)
    assert [one.name for one in server.inspect.workers()] == []
    server.close()


def test_sender_finds_the_new_master_while_the_old_one_hangs(mortal_cluster: RedisCluster) -> None:
    driver = RedisClusterDriver(mortal_cluster.url, timeout=1.0)
    broker = ClusterBroker(driver)
    message = Message(uuid="u", name="n", queue="q", body=b"x")

    def is_put() -> bool:
        try:
            return broker.put([message], token="again") in (True, False)
        except MachineryError:
            return False

    assert broker.put([message], token="first")
    hanging = mortal_cluster.node_of("q")
    hanging.freeze()
    try:
        wait_until(is_put, 20.0, "the message at the new master")
    finally:
        hanging.thaw()
    driver.close()
