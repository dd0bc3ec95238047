"""Workers whose store is away, at their start or later.

They wait, report it, and end when asked or allowed to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from machinery_py import Config, GroupResult, Server, group
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    ConfigError,
    MachineryError,
    StoreUnusable,
)
from machinery_py.events import ConnectionLost, ConnectionRestored
from machinery_py.tasks.backoff import SCHEDULES, reconnect_delay
from machinery_py.testing.waiting import wait_until
from machinery_py.worker.worker import Worker
from tests.cli.app import HANG, App, app_in_a_folder, children
from tests.support.private import free_port
from tests.support.proxy import Proxy
from tests.support.servers import PostgreSQLServer, RedisServer, require

app = app_in_a_folder
PrivateStore = RedisServer | PostgreSQLServer
OpenProxy = Callable[[int], Proxy]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server of the test's own, which is not started; its port is known."""
    require(RedisServer)
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(params=[RedisServer, PostgreSQLServer])
def store(request: pytest.FixtureRequest) -> Iterator[PrivateStore]:
    """The same of each kind."""
    require(request.param)
    server = request.param()
    yield server
    server.close()


class Launched:
    """`Worker.launch` in a thread, and how it ended."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.failures: list[BaseException] = []
        self._thread = worker.launch_async(self.failures.append)

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(HANG)
        assert self.is_over()


def told(worker: Worker) -> list[ConnectionLost]:
    """Each attempt, as it comes; the next one is at once."""
    found: list[ConnectionLost] = []

    @worker.set_connection_error_handler
    def at_once(lost: ConnectionLost) -> float:
        found.append(lost)
        return 0.0

    return found


# At the start


@pytest.mark.parametrize("processes", ["1", "2"])
def test_worker_started_before_its_server_waits(
    app: App, store: PrivateStore, processes: str
) -> None:
    app.env["MACHINERY_URL"] = store.url
    worker = app.start("worker", "tasks", "-p", processes)
    worker.wait_for("no tasks can be received", times=int(processes))
    before = children(worker.pid)
    app.run("health", "tasks")
    app.run("health", "tasks", "--ready", code=1)
    assert "Ready." not in worker.out

    store.start()
    worker.wait_ready()
    uuid = app.send("note", "hello")
    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG, "the task's end")

    assert worker.err.count("no tasks can be received") == int(
        processes
    )  # once for each, however many attempts there were
    assert (children(worker.pid)) == before
    assert worker.stop() == 0


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("away", ["refused", "black hole"])
def test_waiting_worker_stops_at_once(
    app: App, store: PrivateStore, open_proxy: OpenProxy, away: str, processes: str
) -> None:
    proxy = open_proxy(store.port)
    if away == "refused":
        proxy.refuse()
    else:
        store.start()
        proxy.black_hole()
    # A connection would last for longer than the test.
    app.env |= {"MACHINERY_URL": proxy.through(store.url), "MACHINERY_PUBLISH_TIMEOUT": "300"}
    worker = app.start(
        "worker", "tasks", "-p", processes, MACHINERY_BROKER_CONNECTION_BACKOFF="linear"
    )
    if away == "refused":
        worker.wait_for("no tasks can be received", times=int(processes))
    else:
        wait_until(
            lambda: proxy.open_connections >= int(processes), HANG, "attempts of all processes"
        )

    worker.signal(signal.SIGINT if processes == "1" else signal.SIGTERM)

    assert worker.wait() == 0
    assert "Traceback" not in worker.err


@pytest.mark.parametrize("processes", ["1", "2"])
def test_permanent_error_ends_a_worker_at_once(app: App, processes: str) -> None:
    require(RedisServer)
    with RedisServer(password="sesame") as redis:
        for url in (redis.url.replace("sesame", "wrong"), redis.url.replace(":sesame@", "")):
            done = app.run("worker", "tasks", "-p", processes, code=3, MACHINERY_URL=url)
            assert "check user, password, rights and version" in done.stderr
            assert "wrong@" not in done.stderr and "Traceback" not in done.stderr
        done = app.run(
            "worker", "tasks", code=3, MACHINERY_URL=redis.url, MACHINERY_STRICT_DURABILITY="1"
        )
        assert "refused by strict_durability: it has no append-only file" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "LOADING Redis is loading the dataset in memory",
        "NOREPLICAS Not enough good replicas to write.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "MISCONF Redis is configured to save RDB snapshots, "
        "but it's currently unable to persist on disk.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "ERR max number of clients reached",
        "READONLY You can't write against a read only replica.",
    ],
)
def test_a_server_that_is_not_ready_is_waited_for(
    redis: RedisServer, open_proxy: OpenProxy, text: str
) -> None:
    redis.start()
    proxy = open_proxy(redis.port)
    server = Server(Config(broker=proxy.through(redis.url)))
    answer = server.register_task("answer", lambda: 42)
    proxy.answer_next(text, matching=b"EVALSHA", times=3)
    worker = server.new_worker("patient", concurrency=1)
    lost = told(worker)
    launched = Launched(worker)

    wait_until(lambda: worker.ready, HANG, "a worker that is ready")

    assert answer.send().get(timeout=HANG) == 42
    assert [one.attempt for one in lost] == [1, 2, 3]
    worker.quit()
    launched.join()
    assert not launched.failures
    server.close()


def test_worker_starts_on_a_full_server_once_there_is_room(
    redis: RedisServer,
) -> None:
    redis.start()
    redis.cli("CONFIG", "SET", "maxmemory", "1mb")
    server = Server(Config(broker=redis.url))
    worker = server.new_worker("patient", concurrency=1)
    lost = told(worker)
    launched = Launched(worker)
    wait_until(lambda: len(lost) > 2, HANG, "some attempts")
    assert not worker.ready
    assert "broker full" in lost[0].error

    redis.cli("CONFIG", "SET", "maxmemory", "0")

    wait_until(lambda: worker.ready, HANG, "a worker that is ready")
    worker.quit()
    launched.join()
    server.close()


def test_start_itself_does_not_wait(store: PrivateStore) -> None:
    server = Server(store.url)
    worker = server.new_worker("impatient", concurrency=1)
    with pytest.raises(BrokerUnavailable, match="refused"):
        worker.start()

    store.start()
    with worker:
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
    server.close()


def test_stopped_worker_leaves_no_session(store: PrivateStore, open_proxy: OpenProxy) -> None:
    store.start()
    proxy = open_proxy(store.port)
    proxy.black_hole()
    server = Server(Config(broker=proxy.through(store.url), publish_timeout=HANG))
    worker = server.new_worker("asked", concurrency=1)
    launched = Launched(worker)
    wait_until(lambda: proxy.open_connections, HANG, "an attempt")

    worker.quit()
    launched.join()
    proxy.heal()

    wait_until(
        lambda: not any(one.name == "asked-connect" for one in threading.enumerate()),
        HANG,
        "the attempt's end",
    )
    assert server.broker.workers() == []
    server.close()


# Limits and handlers


def dead() -> str:
    return f"redis://:sesame@127.0.0.1:{free_port()}/0"


def test_worker_gives_up_after_its_number_of_attempts() -> None:
    url = dead()
    server = Server(Config(broker=url, broker_connection_max_retries=3))
    worker = server.new_worker("counting", concurrency=1)
    lost = told(worker)

    with pytest.raises(
        BrokerUnavailable, match=r"gives up after 3 attempts \(broker_connection_max_retries\)"
    ) as caught:
        worker.launch(signals=False)

    assert "worker counting" in str(caught.value)
    assert url.partition("@")[2].partition("/")[0] in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert [(one.attempt, one.limit) for one in lost] == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(BrokerUnavailable, match="after 3 attempts"):  # it may be launched again
        worker.launch(signals=False)
    server.close()


@pytest.mark.parametrize(
    "url", ["redis://{}/0", "amqp://{}", "mongodb://{}/db", "postgresql://{}/db"]
)
def test_an_attempt_that_fails_leaves_no_file_open(url: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    server = Server(Config(broker=url.format(f"127.0.0.1:{free_port()}")))

    with pytest.raises(MachineryError):
        server.broker.consume(["q"], worker="w")

    files = [name for name in set(os.listdir("/proc/self/fd")) - before if _is_of_a_session(name)]
    server.close()
    assert files == []


def _is_of_a_session(descriptor: str) -> bool:
    try:
        return tempfile.gettempdir() in os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return False


def test_without_retry_the_first_failure_is_the_last() -> None:
    server = Server(
        Config(broker=dead(), broker_connection_retry=False, broker_connection_backoff="linear")
    )
    worker = server.new_worker(concurrency=1)

    with pytest.raises(
        BrokerUnavailable, match=r"gives up after 1 attempt \(broker_connection_retry is off\)"
    ):
        worker.launch(signals=False)
    server.close()


def test_attempts_are_counted_over_all_servers() -> None:
    urls = [dead(), dead()]
    server = Server(
        Config.from_mapping(
            {
                "broker": ";".join(urls),
                "multiple_broker_separator": ";",
                "broker_connection_max_retries": 5,
            }
        )
    )
    worker = server.new_worker(concurrency=1)
    lost = told(worker)

    with pytest.raises(
        BrokerUnavailable, match="gives up after 6 attempts"
    ):  # a round that has begun is finished
        worker.launch(signals=False)

    assert [one.attempt for one in lost] == [2, 4, 6]
    server.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_that_runs_gives_up_too(app: App, redis: RedisServer, busy: bool) -> None:
    redis.start()
    app.env |= {
        "MACHINERY_URL": redis.url,
        "MACHINERY_BROKER_CONNECTION_MAX_RETRIES": "3",
        "MACHINERY_SHUTDOWN_TIMEOUT": "1",
    }
    worker = app.worker()
    if busy:
        app.send("hold", "slow")
        wait_until(lambda: app.notes, HANG, "a task that runs")

    redis.kill()
    app.go("slow")

    assert worker.wait() == 3
    assert "gives up after 3 attempts (broker_connection_max_retries)" in worker.err
    assert "Traceback" not in worker.err


def test_programs_hear_of_the_loss_and_of_the_return(
    store: PrivateStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.start()
    server = Server(Config(broker=store.url))
    answer = server.register_task("answer", lambda: 42)
    lost: list[ConnectionLost] = []
    restored: list[ConnectionRestored] = []
    server.events.subscribe(ConnectionLost, lost.append)
    server.events.subscribe(ConnectionRestored, restored.append)

    with server.new_worker("watched", concurrency=1) as worker:
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
        caplog.set_level(logging.DEBUG, "machinery_py.worker.reconnect")
        store.kill()
        wait_until(lambda: len(lost) > 3, HANG, "some attempts")
        store.start()
        assert answer.send().get(timeout=HANG) == 42
        wait_until(lambda: restored, HANG, "the news of its return")

    assert [one.attempt for one in lost] == list(range(len(lost)))
    assert (restored[0].worker, restored[0].attempts, len(restored)) == (
        "watched",
        lost[-1].attempt,
        1,
    )
    lines = [record for record in caplog.records if "no tasks can be received" in record.message]
    assert [line.levelname for line in lines][:4] == ["ERROR", "DEBUG", "DEBUG", "DEBUG"]
    assert "(attempt 2)" in lines[2].message and f"127.0.0.1:{store.port}" in lines[2].message
    server.close()


def test_a_handler_that_fails_does_no_harm(redis: RedisServer) -> None:
    server = Server(Config(broker=redis.url, broker_connection_max_retries=2))
    worker = server.new_worker(concurrency=1)

    @worker.set_connection_error_handler
    def broken(_: ConnectionLost) -> float:
        raise ValueError("a bug")

    with pytest.raises(BrokerUnavailable, match="gives up after 2"):
        worker.launch(signals=False)
    server.close()


def test_pauses_grow_to_their_longest_one() -> None:
    assert [reconnect_delay("linear", n) for n in (1, 2, 3, 14, 15, 16, 10**6)] == [
        2,
        4,
        6,
        28,
        30,
        30,
        30,
    ]
    assert [reconnect_delay("fibonacci", n) for n in range(1, 10)] == [
        1,
        2,
        3,
        5,
        8,
        13,
        21,
        30,
        30,
    ]
    for attempt, longest in ((1, 0.1), (2, 0.2), (7, 6.4), (8, 10.0), (10**6, 10.0)):
        found = [reconnect_delay("jitter", attempt) for _ in range(200)]
        assert 0.0 <= min(found) < 0.2 * longest < 0.8 * longest < max(found) <= longest


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"backoff: found 'jiter' \(known: fibonacci, jitter, linear; did you mean 'jitter'",
    ):
        Config(broker_connection_backoff="jiter")
    assert all(
        Config(broker_connection_backoff=name).broker_connection_backoff == name
        for name in SCHEDULES
    )


# Senders


@pytest.mark.parametrize("away", ["refused", "black hole", "black hole on a used connection"])
def test_sender_waits_no_longer_than_its_timeout(
    store: PrivateStore, open_proxy: OpenProxy, away: str
) -> None:
    store.start()
    proxy = open_proxy(store.port)
    server = Server(Config(broker=proxy.through(store.url), publish_timeout=1.5))
    answer = server.register_task("answer", lambda: 42)
    if away == "black hole on a used connection":
        answer.send()
    if away == "refused":
        proxy.refuse()
    else:
        proxy.black_hole()

    before = time.monotonic()
    with pytest.raises(MachineryError) as caught:
        answer.send()
    passed = time.monotonic() - before

    assert (
        0.3 < passed < 2.8
    )  # publish_timeout, and what a loaded machine adds; twice of it would be 3
    assert not isinstance(caught.value, StoreUnusable)
    server.close()


async def _all_of(results: GroupResult[int]) -> list[int]:
    return sorted([await one.get_async() async for one in results.as_completed(HANG)])


WAITS: dict[str, Callable[[GroupResult[int]], object]] = {
    "get": lambda results: results.get(HANG),
    "one": lambda results: [one.get(HANG) for one in results],
    "get_async": lambda results: asyncio.run(results.get_async(HANG)),
    "propagate": lambda results: results.get(HANG, propagate=False),
    "as_completed": lambda results: sorted(one.get() for one in results.as_completed(HANG)),
    "async for": lambda results: asyncio.run(_all_of(results)),
}


@pytest.mark.parametrize(
    ("store", "way"),
    [
        *((RedisServer, way) for way in WAITS),
        *((PostgreSQLServer, way) for way in ("get", "get_async")),
    ],
    indirect=["store"],
)
def test_waiter_for_results_waits_for_their_store(
    store: PrivateStore, open_proxy: OpenProxy, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.start()
    proxy, gate = open_proxy(store.port), threading.Event()
    working, asking = Server(store.url), Server(proxy.through(store.url))

    @working.task("hold")
    def hold(number: int) -> int:
        assert gate.wait(HANG)
        return number

    asked = asking.register_task("hold", hold.function)
    with working.new_worker(concurrency=2, scheduler=False), ThreadPoolExecutor(1) as pool:
        results = asking.send(group(asked.signature(1), asked.signature(2)))
        waiting = pool.submit(WAITS[way], results)
        wait_until(lambda: proxy.open_connections > 1)
        proxy.refuse()
        proxy.reset()
        wait_until(lambda: "waiting for a result, and for its store" in caplog.text)
        assert not waiting.done()
        proxy.heal()
        gate.set()

        assert waiting.result(HANG) == [1, 2]
    asking.close()
    working.close()


@pytest.mark.parametrize("way", ["thread", "coroutine"])
def test_waiter_whose_time_ends_in_an_outage_is_told_of_it(redis: RedisServer, way: str) -> None:
    redis.start()
    server = Server(redis.url)
    result = server.task(len).send("x")
    assert not result.is_finished()
    redis.stop()
    begin = time.monotonic()

    with pytest.raises(BackendUnavailable, match="Redis"):
        if way == "thread":
            result.get(timeout=1.5)
        else:
            asyncio.run(result.get_async(timeout=1.5))

    assert time.monotonic() - begin >= 1.5
    server.close()


async def _locked(server: Server, timeout: float | None) -> bool:
    return await server.lock("feed").acquire_async(timeout=timeout)


async def _let_in(server: Server, timeout: float | None) -> bool:
    return await server.limiter("db", max_running=1).acquire_async(timeout=timeout)


TAKES: dict[str, Callable[[Server, float | None], bool]] = {
    "lock": lambda server, timeout: server.lock("feed").acquire(timeout=timeout),
    "lock_async": lambda server, timeout: asyncio.run(_locked(server, timeout)),
    "limiter": lambda server, timeout: server.limiter("db", max_running=1).acquire(timeout=timeout),
    "limiter_async": lambda server, timeout: asyncio.run(_let_in(server, timeout)),
}


@pytest.mark.parametrize(
    ("store", "way"),
    [*((RedisServer, way) for way in TAKES), (PostgreSQLServer, "limiter")],
    indirect=["store"],
)
def test_lock_and_limiter_wait_for_their_store(
    store: PrivateStore, open_proxy: OpenProxy, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.start()
    proxy = open_proxy(store.port)
    server = Server(proxy.through(store.url))
    server.lock("other").acquire()
    proxy.refuse()
    proxy.reset()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(TAKES[way], server, HANG)
        wait_until(lambda: "and for its store" in caplog.text)
        assert not waiting.done()
        proxy.heal()

        assert waiting.result(HANG) is True
    assert TAKES[way](server, 0.0) is False, "it is held"
    server.close()


@pytest.mark.parametrize("timeout", [0.0, 1.5, None], ids=["at-once", "timeout", "no-timeout"])
@pytest.mark.parametrize("way", TAKES)
def test_lock_and_limiter_are_told_of_an_outage_when_their_time_is_up(
    redis: RedisServer, way: str, timeout: float | None
) -> None:
    redis.start()
    server = Server(Config(broker=redis.url, publish_timeout=1.5))
    server.lock("other").acquire()
    redis.stop()
    begin = time.monotonic()

    with pytest.raises(BackendUnavailable, match="Redis"):
        TAKES[way](server, timeout)

    assert time.monotonic() - begin >= (1.5 if timeout is None else timeout)
    server.close()
