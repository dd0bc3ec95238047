"""Orders to workers over each broker: asked from another process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machinery_py import Config, MachineryError, Server
from machinery_py.testing.waiting import HANG, wait_until

_numbers = itertools.count(1)

OpenServer = Callable[[], Server]


@pytest.fixture
def open_server(url: str) -> Iterator[OpenServer]:
    """Opens a Server with connections of its own, as another process would."""
    opened: list[Server] = []

    def open_one() -> Server:
        opened.append(Server(Config(broker=url, result_backend="memory://")))
        return opened[-1]

    yield open_one
    for server in opened:
        server.close()


class Control:
    """Tests over each broker, which `url` is of."""

    def test_workers_of_another_process_answer(self, open_server: OpenServer) -> None:
        """L32, T01, T05: each that lives answers; one that does not is named."""
        own, asking, gate = open_server(), open_server(), threading.Event()
        wait = own.register_task("wait", lambda: gate.wait(HANG))
        with own.new_worker("ada", 1) as ada, own.new_worker("bob-1", 3, queues=["other"]):
            try:
                running, waiting = wait.send(), wait.send()
                wait_until(lambda: ada.active == 1)

                assert set(asking.control.ping(timeout=HANG)) == {"ada", "bob-1"}
                stats = asking.control.workers("b*", timeout=HANG).stats()
                assert [(name, one.concurrency) for name, one in stats.items()] == [("bob-1", 3)]
                workers = asking.control.workers("ada", timeout=HANG)
                [active] = workers.active()["ada"]
                assert {active.uuid, *(one.uuid for one in workers.reserved()["ada"])} <= {
                    running.uuid,
                    waiting.uuid,
                }
                assert [one.name for one in workers.queues()["ada"]] == ["machinery_tasks"]
                assert workers.registered() == {"ada": ["wait"]}
                [stack] = [one for one in workers.stack()["ada"] if one.task == active.uuid]
                assert (stack.thread, "gate.wait" in stack.stack) == (active.place, True)
            finally:
                gate.set()

    def test_worker_is_changed_while_it_runs(self, open_server: OpenServer) -> None:
        """T06, T08, T09: concurrency and queues, from another process."""
        own, asking, gate = open_server(), open_server(), threading.Event()
        wait = own.register_task("wait", lambda: gate.wait(HANG))
        with own.new_worker("ada", 1) as ada:
            workers = asking.control.workers("ada", timeout=HANG)
            try:
                wait.send()
                elsewhere = wait.options(queue="other").send()
                wait_until(lambda: ada.active == 1)
                workers.set_concurrency(2)
                workers.add_queue("other")
                wait_until(lambda: ada.active == 2)
                assert {one.uuid for one in workers.active()["ada"]} >= {elsewhere.uuid}

                workers.cancel_queue("machinery_tasks")
                assert [one.name for one in workers.queues()["ada"]] == ["other"]
                [info] = asking.broker.workers()
                assert list(info.queues) == ["other"]
                with pytest.raises(MachineryError, match="ada: .* is the only queue"):
                    workers.cancel_queue("other")
            finally:
                gate.set()

    def test_worker_that_does_not_answer_is_named_in_time(self, open_server: OpenServer) -> None:
        deaf, asking = open_server(), open_server()
        consumer = deaf.broker.consume(["other"], worker="deaf")
        try:
            began = time.monotonic()
            answers = asking.control.workers("de*", "nobody", timeout=0.2).ping()
            assert time.monotonic() - began < HANG
        finally:
            consumer.close()

        assert (answers, answers.missing) == ({}, ("nobody", "deaf"))
        assert asking.control.ping() == {}


class TestMemory(Control):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://control-{next(_numbers)}"


class TestSQLite(Control):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db?synchronous=normal"


class TestRedis(Control):
    @pytest.fixture
    def url(self, redis_url: str) -> str:
        return redis_url


class TestMongo(Control):
    @pytest.fixture
    def url(self, mongodb_url: str) -> str:
        return mongodb_url


class TestAMQP(Control):
    @pytest.fixture
    def url(self, amqp_url: str) -> str:
        return amqp_url
