"""Limited tasks in workers over all stores, and pairs of those that keep no limits with one."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, TaskFailed
from machinery_py.testing.conformance.exclusive import Overlap
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.fixtures import url_of

#: Broker, result backend and lock store.
STORES = (
    "sqlite",
    "postgresql",
    "redis",
    "cluster",
    "mongodb",
    "amqp++redis",
    "amqp+memcached+sqlite",
    "redis+memcached",
)


@pytest.fixture(params=STORES)
def server(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Server]:
    urls = [one and url_of(one, tmp_path / "tasks.db", request) for one in request.param.split("+")]
    broker, backend, lock = [*urls, "", ""][:3]
    config = Config(broker=broker, result_backend=backend, lock=lock, default_queue="limited")
    with contextlib.closing(Server(config)) as server:
        yield server


def in_use(server: Server) -> bool:
    reports = [one for scope in server.inspect.limits() for one in scope.usage]
    return any(one.running or one.waiting for one in reports)


def test_rate_holds_over_two_workers_and_each_call_runs_once(server: Server) -> None:
    began: dict[int, float] = {}

    @server.task(rate="20/s")
    def call_api(number: int) -> int:
        assert began.setdefault(number, now := time.monotonic()) == now
        return number

    start = time.monotonic()
    workers = [server.new_worker(concurrency=2, scheduler=False) for _ in range(2)]
    with workers[0], workers[1]:
        results = [call_api.send(number) for number in range(12)]
        assert [one.get(timeout=HANG) for one in results] == list(range(12))
        wait_until(lambda: not in_use(server), HANG, what="no place is left")

    # They are an interval apart, and one may be a quarter of a second late without delaying others.
    assert max(began.values()) - start >= 11 * 0.05 - 0.25


def test_two_of_a_key_run_at_a_time_and_other_tasks_go_on(server: Server) -> None:
    gate, overlaps = threading.Event(), {"a": Overlap(), "b": Overlap()}

    @server.task(max_running=2, running_key="key")
    def hold(key: str) -> None:
        with overlaps[key]:
            gate.wait(HANG)

    @server.task
    def plain(number: int) -> int:
        return number

    with server.new_worker(concurrency=6, scheduler=False):
        results = [hold.send("a") for _ in range(6)]
        wait_until(lambda: overlaps["a"].inside == 2, HANG)
        results += [hold.send("b") for _ in range(3)]
        wait_until(lambda: overlaps["b"].inside == 2, HANG)
        assert plain.send(7).get(timeout=HANG) == 7
        gate.set()
        for one in results:
            one.get(timeout=HANG)
        wait_until(lambda: not in_use(server), HANG, what="no slot is left")

    assert [(one.most, one.runs) for one in overlaps.values()] == [(2, 6), (2, 3)]


def test_limited_task_without_a_store_of_limits_fails_in_words(
    amqp_url: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    backend = url_of("memcached", tmp_path, request)
    with contextlib.closing(Server(Config(broker=amqp_url, result_backend=backend))) as server:
        call_api = server.task("call_api", rate="5/s")(print)
        with (
            server.new_worker(concurrency=1, scheduler=False),
            pytest.raises(TaskFailed, match="its limits cannot be kept: .*lock"),
        ):
            call_api.send().get(timeout=HANG)
