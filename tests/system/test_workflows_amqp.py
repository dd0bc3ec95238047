"""Whole applications over RabbitMQ, with real workers in threads and results there or elsewhere.

Redis has the whole suite. The other backends have what depends on the pair: how a task ends, retries, groups, paused queues;
`make matrix` and `make chaos` run the whole with them as well, in test_pairs.py.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from machinery_py import Config, Server, Unsupported, group
from machinery_py.config.sections import AMQPConfig
from machinery_py.testing.conformance.workflows import WorkflowConformance
from machinery_py.testing.waiting import HANG, wait_until
from tests.backends.memcached.case import empty_memcached
from tests.stores.pair_case import ALL_PAIRS
from tests.stores.rabbitmq.case import amqp_url, vhosts
from tests.support.fixtures import rabbitmq_server
from tests.support.servers import MemcachedServer, RedisServer

__all__ = ["amqp_url", "empty_memcached", "rabbitmq_server", "vhosts"]

OF_THE_PAIR = {
    "test_task_returns_its_result",
    "test_retry_keeps_the_uuid_and_counts_attempts",
    "test_on_error_callback_is_sent_once_after_last_attempt",
    "test_chain_of_a_hundred_steps_runs",
    "test_large_chord_runs",
    "test_chord_with_a_failed_member_fails",
    "test_task_with_an_eta_runs_at_it",
    "test_revoked_task_is_never_started",
    "test_bytes_that_are_no_signature_become_a_dead_letter",
    "test_unregistered_task_waits_for_a_worker_that_knows_it",
    "test_pausing_a_queue_lets_running_tasks_go_on",
    "test_two_workers_run_no_task_twice",
    "test_task_unfinished_at_shutdown_is_run_by_another_worker",
    "test_burst_worker_ends_when_its_queues_are_empty",
}


class TestRabbitMQAndRedisBackend(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(
        self, amqp_url: str, empty_redis: RedisServer, request: pytest.FixtureRequest
    ) -> Server:
        arguments = {"x-max-priority": 10} if "priorit" in request.node.name else {}
        amqp = AMQPConfig(queue_declare_args=arguments)
        return Server(Config(broker=amqp_url, result_backend=empty_redis.url, amqp=amqp))


class OfThePair(WorkflowConformance):
    """The part of the suite that each further pair has."""

    __test__ = False


for _name in dir(OfThePair):
    if _name.startswith("test_") and _name not in OF_THE_PAIR:
        setattr(OfThePair, _name, None)


class TestRabbitMQAndMemoryBackend(OfThePair):
    __test__ = not ALL_PAIRS

    @pytest.fixture
    def server(self, amqp_url: str) -> Server:
        return Server(Config(broker=amqp_url, result_backend="memory://amqp-workflows"))


class TestRabbitMQAndSQLiteBackend(OfThePair):
    __test__ = not ALL_PAIRS

    @pytest.fixture
    def server(self, amqp_url: str, tmp_path: Path) -> Server:
        return Server(
            Config(
                broker=amqp_url, result_backend=f"sqlite:///{tmp_path}/states.db?synchronous=normal"
            )
        )


class TestRabbitMQAndMemcacheBackend(OfThePair):
    __test__ = not ALL_PAIRS

    @pytest.fixture
    def server(self, amqp_url: str, empty_memcached: MemcachedServer) -> Server:
        return Server(Config(broker=amqp_url, result_backend=empty_memcached.url))


class TestRabbitMQAndMemoryBroker(OfThePair):
    __test__ = True

    # A thousand tasks are a thousand queues: `make matrix` has the time.
    test_large_chord_runs = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, amqp_url: str) -> Server:
        return Server(
            Config(broker=f"memory://{amqp_url.rpartition('/')[2]}", result_backend=amqp_url)
        )


class TestRabbitMQAlone(OfThePair):
    __test__ = True

    test_large_chord_runs = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, amqp_url: str) -> Server:
        return Server(Config(broker=amqp_url))


def test_the_cut_names_tests_that_there_are() -> None:
    assert set(dir(WorkflowConformance)) >= OF_THE_PAIR


def test_rabbitmq_alone_runs_tasks_whose_results_nobody_wants(amqp_url: str) -> None:
    server = Server(Config(broker=amqp_url, result_backend="null"))
    ran: list[str] = []
    lock = threading.Lock()

    def note(word: str) -> None:
        with lock:
            ran.append(word)

    @server.task
    def plain(word: str) -> str:
        note(word)
        return word

    @server.task(retries=2, backoff=lambda _: 0.05)
    def shaky() -> None:
        note("shaky")
        raise RuntimeError("again")

    @server.task
    def failed(text: str) -> None:
        note(f"failed {text}")

    with server.new_worker(concurrency=4):
        for number in range(50):
            plain.send(str(number))
        plain.signature("first").replace(immutable=True).then(plain.signature("after")).send()
        plain.options(delay=0.1).send("later")
        shaky.signature().catch(failed.partial()).send()
        expected = sorted(
            [*map(str, range(50)), "first", "after", "later", *["shaky"] * 3, "failed again"]
        )
        wait_until(lambda: len(ran) >= len(expected), HANG, what="all runs")
        wait_until(
            lambda: not any(one.running or one.waiting for one in server.inspect.queues()),
            HANG,
            what="an empty queue",
        )
    assert sorted(ran) == expected
    with pytest.raises(Unsupported):
        group(plain.signature("a"), plain.signature("b")).send()
    server.close()
