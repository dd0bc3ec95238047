"""A Redis Cluster whose slot moves and whose master dies, or hands over, while workers run."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from machinery_py import Config, Server, State, chord, current_task, group
from machinery_py.brokers.base import Message
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.config.sections import RedisConfig
from machinery_py.connections.redis.cluster import ClusterDriver
from machinery_py.errors import MachineryError
from machinery_py.events import ConnectionLost
from machinery_py.testing.waiting import wait_until
from tests.support.servers import RedisCluster, RedisServer, ReplyError, require

HOST = "127.0.0.1"
HANG = 60.0  # seconds; a guard, nothing is measured with it
QUEUES = ("machinery_tasks", "mail", "video")
TAG = "{machinery}"  # its slot has all keys


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
def repeated(step: Callable[[], object]) -> Iterator[list[float]]:
    """Repeat the step during the block, with a pause in between; yield when each was done."""
    over = threading.Event()
    done: list[float] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            while not over.is_set():
                step()
                done.append(time.monotonic())
                over.wait(0.3)
        except Exception as error:  # told in the test's thread, which waits no longer
            failures.append(error)
            done.extend([time.monotonic()] * 1000)

    thread = threading.Thread(target=run, name="moving keys")
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
    assert not failures


def move_on(cluster: RedisCluster) -> None:
    """Move all keys, some at a time, to the next of the masters."""
    source, masters = cluster.node_of(TAG), cluster.masters
    cluster.move(TAG, masters[(masters.index(source) + 1) % len(masters)], at_once=5)


class HandOver:
    """Lets the replica of the keys' master take over from it, which loses nothing."""

    ATTEMPT = 6.0  # seconds; the nodes give one up after 5
    VOTES = 2.5  # seconds until the others vote again for a replica of the same master

    def __init__(self) -> None:
        self._asked: dict[RedisServer, float] = {}

    def __call__(self, cluster: RedisCluster) -> None:
        before = cluster.node_of(TAG)
        pause = self.VOTES - (time.monotonic() - self._asked.get(before, -HANG))
        if pause > 0:
            time.sleep(pause)
        self._asked[before] = -HANG
        wait_until(lambda: self._is_done(cluster, before), 2 * HANG, f"another one than {before}")

    def _is_done(self, cluster: RedisCluster, before: RedisServer) -> bool:
        try:
            owners = [cluster.owner_at(one, TAG) for one in cluster.nodes]
            if before not in owners and None not in owners:
                return True
            if time.monotonic() - self._asked[before] > self.ATTEMPT:
                heir = heir_of(cluster, before)
                if heir is not None and _offsets(before)[1] >= 0:
                    self._asked[before] = time.monotonic()
                    heir.cli("CLUSTER", "FAILOVER")
        except (ConnectionError, ReplyError):
            pass  # a master steps down, or the heir has taken over and not all know it yet
        return False


def heir_of(cluster: RedisCluster, master: RedisServer) -> RedisServer | None:
    """Return the replica of a master, as that knows it."""
    number = str(master.cli("CLUSTER", "MYID"))
    lines = [line.split() for line in str(master.cli("CLUSTER", "NODES")).splitlines()]
    places = [line[1].partition("@")[0] for line in lines if line[3] == number]
    return next((node for node in cluster.nodes if f"{HOST}:{node.port}" in places), None)


def run_under(
    cluster: RedisCluster, server: Server, step: Callable[[RedisCluster], object], least: int
) -> Ran:
    """Send and run tasks of all kinds while the step is repeated so often; return what ran."""
    ran = Ran(server)
    with (
        repeated(lambda: step(cluster)) as done,
        server.new_worker(queues=list(QUEUES), concurrency=4),
    ):
        number = 0
        while len(done) < least or number < 5:
            calls = [ran.add.options(queue=QUEUES[n % 3]).send(n, 1) for n in range(12)]
            members = group(ran.add.signature(n, number) for n in range(4))
            callback = server.send(chord(members, ran.total.partial()))
            late = [ran.add.options(delay=0.2).send(n, 1) for n in range(3)]
            assert [one.get(timeout=HANG) for one in calls] == [n + 1 for n in range(12)]
            assert callback.get(timeout=HANG) == 4 * number + 6
            assert [one.get(timeout=HANG) for one in late] == [n + 1 for n in range(3)]
            number += 1
    assert len(ran.runs) == number * (12 + 5 + 3)
    assert not server.inspect.dead()
    assert not any(one.waiting + one.delayed + one.running for one in server.inspect.queues())
    return ran


def test_slot_that_moves_loses_and_doubles_nothing(
    empty_cluster: RedisCluster, server: Server
) -> None:
    ran = run_under(empty_cluster, server, move_on, least=4)

    assert set(ran.runs.values()) == {1}


def test_master_that_hands_over_loses_and_doubles_nothing(
    mortal_cluster: RedisCluster,
) -> None:
    server = Server(Config(broker=mortal_cluster.url, publish_timeout=20.0))

    ran = run_under(mortal_cluster, server, HandOver(), least=3)

    assert set(ran.runs.values()) == {1}
    server.close()


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
            owner = cluster.node_of(TAG)
            owner.kill()
            ran.gate.set()
            waiting += [ran.add.options(queue=QUEUES[n % 3]).send(n, 1) for n in range(30, 36)]

            assert result.get(timeout=HANG) == sum(range(6))
            assert [one.get(timeout=HANG) for one in waiting] == [n + 1 for n in range(36)]
            assert cluster.node_of(TAG) is not owner

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
    for node in empty_cluster.masters:  # the keys are at one of them
        server = Server(Config(broker=node.url, redis=RedisConfig(cluster_mode=True)))
        ran = Ran(server)

        with server.new_worker(queues=list(QUEUES), concurrency=2):
            results = [ran.add.options(queue=queue).send(1, 2) for queue in QUEUES]
            assert [one.get(timeout=HANG) for one in results] == [3, 3, 3]
        server.close()


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
    assert all("cluster 127.0.0.1" in error for error in lost[:3])
    assert [one.name for one in server.inspect.workers()] == []
    server.close()


def test_sender_finds_the_new_master_while_the_old_one_hangs(mortal_cluster: RedisCluster) -> None:
    driver = ClusterDriver(mortal_cluster.url, timeout=1.0)
    broker = RedisBroker(driver)
    message = Message(uuid="u", name="n", queue="q", body=b"x")

    def is_put() -> bool:
        try:
            return broker.put([message], token="again") in (True, False)
        except MachineryError:
            return False

    assert broker.put([message], token="first")
    hanging = mortal_cluster.node_of(TAG)
    hanging.freeze()
    try:
        wait_until(is_put, 20.0, "the message at the new master")
    finally:
        hanging.thaw()
    driver.close()


def test_master_killed_under_load_leaves_no_task_stuck(mortal_cluster: RedisCluster) -> None:
    """What the replica did not have is lost, message and state together: the rest ends."""
    server = Server(Config(broker=mortal_cluster.url, publish_timeout=20.0))
    ran = Ran(server)

    def send(number: int) -> None:
        with contextlib.suppress(MachineryError):  # nobody knows whether it is lost
            ran.add.options(queue=QUEUES[number % 3]).send(number, 1)

    def are_over() -> bool:
        states = {one.state for one in server.inspect.tasks(limit=1000)}
        queues = server.inspect.queues()
        return states == {State.SUCCESS} and not any(one.waiting + one.running for one in queues)

    with server.new_worker(queues=list(QUEUES), concurrency=4):
        for number in range(100):
            send(number)
        mortal_cluster.node_of(TAG).kill()
        for number in range(100, 200):
            send(number)

        wait_until(are_over, 2 * HANG, "the end of all tasks that are known")
        assert ran.add.send(1, 2).get(timeout=HANG) == 3
    assert len(ran.runs) > 100
    server.close()
