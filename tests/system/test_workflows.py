"""Whole applications over one store, with real worker threads. Pairs of stores: test_pairs.py."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery_py import Config, Server, Unsupported, group
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.workflows import LinkedConformance, WorkflowConformance
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import RedisCluster

_numbers = itertools.count(1)


class TestMemory(WorkflowConformance):
    @pytest.fixture
    def server(self) -> Server:
        # A name, so that a second Server finds the same store.
        return Server(Config(broker=f"memory://workflows-{next(_numbers)}"))


class TestSQLite(WorkflowConformance):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(Config(broker=f"sqlite:///{tmp_path}/store.db?synchronous=normal"))


class TestPostgreSQL(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(self, postgres_url: str) -> Server:
        return Server(Config(broker=postgres_url))


class TestRedis(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url))


class TestRedisCluster(WorkflowConformance):
    LONG = 60

    @pytest.fixture
    def server(self, empty_cluster: RedisCluster) -> Server:
        return Server(Config(broker=empty_cluster.url))


class TestMongo(WorkflowConformance):
    LONG = 60

    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestEager(LinkedConformance):
    """Tasks run inside `send`: there is no worker, and nothing is waited for."""

    LONG = 300

    @pytest.fixture
    def server(self) -> Server:
        return Server(Config(broker="eager"))

    @pytest.fixture
    def app(self, idle: App) -> Iterator[App]:
        yield idle


def test_rabbitmq_alone_runs_tasks_without_a_result_backend(amqp_url: str) -> None:
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
