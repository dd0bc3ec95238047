"""Three RabbitMQ nodes as one cluster: several URLs, and a quorum queue whose leader is killed under load."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, State, Task
from machinery_py.config_sections import AMQPConfig
from machinery_py.errors import PublishRefused, PublishUnknown
from machinery_py.events import TaskSucceeded
from machinery_py.testing.servers import RabbitMQCluster, RedisServer, require
from machinery_py.testing.waiting import HANG, wait_until

TASKS = 600  # and so many more after the leader is gone


@pytest.fixture(scope="module")
def cluster() -> Iterator[RabbitMQCluster]:
    require(RabbitMQCluster)
    with RabbitMQCluster() as cluster:
        yield cluster


class Load:
    """A thread that sends tasks until it is told to end; `accepted` has those of which it was told that they are stored."""

    def __init__(self, server: Server, task: Task[[int], int]) -> None:
        self._server = server
        self._task = task
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="load", daemon=True)
        self.accepted: set[str] = set()
        self.failure: BaseException | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(HANG * 2)
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                batch = [self._task.signature(number).with_uuid() for number in range(10)]
                try:
                    self._server.engine.submit(batch)
                except (PublishRefused, PublishUnknown):
                    continue  # the node was killed just now: nobody has promised anything
                self.accepted.update(one.uuid for one in batch)
        except BaseException as error:  # for the test, which has another thread
            self.failure = error


@pytest.mark.timeout(6 * HANG)
def test_a_quorum_queue_outlives_its_leader_under_load(cluster: RabbitMQCluster, empty_redis: RedisServer) -> None:
    config = Config(
        broker=cluster.url, multiple_broker_separator=";", result_backend=empty_redis.url,
        amqp=AMQPConfig(queue_declare_args={"x-queue-type": "quorum"}),
    )
    server = Server(config)
    settled: collections.Counter[str] = collections.Counter()

    @server.task("work")
    def work(number: int) -> int:
        return number

    server.events.subscribe(TaskSucceeded, lambda event: settled.update([event.signature.uuid]))
    first = work.send(0).uuid  # makes the queue
    leader = cluster.leader_of(config.default_queue)
    with server.new_worker("one", 2), server.new_worker("two", 2):
        with Load(server, work) as load:
            wait_until(lambda: len(load.accepted) > TASKS, HANG * 2, "tasks")
            leader.kill()
            before = len(load.accepted)
            wait_until(lambda: len(load.accepted) > before + TASKS, HANG * 2, "tasks after the leader is gone")

        # What the node's consumers held when it died is theirs until it is back: RabbitMQ does not know that they are gone.
        leader.start()

        def finished() -> bool:
            states = server.backend.get_states(list(load.accepted))
            return len(states) == len(load.accepted) and all(one.state is State.SUCCESS for one in states.values())

        wait_until(finished, HANG * 2, "every accepted task to succeed")
        # The last verdicts are told a moment after the states can be read.
        wait_until(lambda: set(settled) >= load.accepted | {first}, HANG, "every settlement to be told")
    server.close()

    assert set(settled.values()) == {1}  # none completed twice
