"""Each option of the configuration's `redis` section has its effect, on a real server."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from machinery_py import Config, Server
from machinery_py.config.sections import RedisConfig
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.pool import PoolLimits
from machinery_py.errors import BackendUnavailable, MachineryError, PublishUnknown
from machinery_py.tasks.signature import Signature
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.proxy import REPLIES, Proxy
from tests.support.servers import RedisServer, require

OpenProxy = Callable[[int], Proxy]


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """One of its own: connections are counted here."""
    require(RedisServer)
    with RedisServer() as server:
        yield server


def clients(redis: RedisServer, name: str) -> list[str]:
    lines = str(redis.cli("CLIENT", "LIST")).splitlines()
    return [line for line in lines if f" name={name} " in line]


def server_with(url: str, *, publish_timeout: float = 5.0, **options: object) -> Server:
    return Server(Config(broker=url, publish_timeout=publish_timeout, redis=RedisConfig(**options)))  # type: ignore[arg-type]


def ping(driver: RedisDriver) -> None:
    assert driver.ask(b"PING", doing="asking") == b"PONG"


def test_connections_have_the_name_that_was_chosen(empty_redis: RedisServer) -> None:
    server = server_with(empty_redis.url, client_name="shop-mail")
    with server.new_worker(concurrency=1) as worker:
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
        assert len(clients(empty_redis, "shop-mail")) >= 2
        assert not clients(empty_redis, "machinery")
    server.close()
    wait_until(lambda: not clients(empty_redis, "shop-mail"), HANG, "connections that are closed")


def test_delayed_tasks_are_under_the_key_that_was_chosen(empty_redis: RedisServer) -> None:
    key = "it's\\delayed ü"
    server = server_with(empty_redis.url, delayed_tasks_key=key)
    answer = server.register_task("answer", lambda: 42)
    soon = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=0.5)
    result = answer.options(eta=soon).send()
    answer.options(eta=soon + dt.timedelta(hours=1)).send()

    assert empty_redis.cli("ZCARD", key.encode()) == 2
    assert empty_redis.cli("EXISTS", "delayed_tasks") == 0
    assert len(server.broker.delayed(10)) == server.broker.stats()[0].delayed == 2
    with server.new_worker(concurrency=1):
        assert result.get(timeout=HANG) == 42
    assert empty_redis.cli("ZCARD", key.encode()) == 1
    assert server.broker.purge("machinery_tasks") == 1
    assert empty_redis.cli("EXISTS", key.encode()) == 0
    server.close()


@pytest.mark.parametrize("option", ["connect_timeout", "read_timeout"])
def test_a_black_hole_is_left_after_the_time_that_was_chosen(
    empty_redis: RedisServer, open_proxy: OpenProxy, option: str
) -> None:
    proxy = open_proxy(empty_redis.port)
    server = server_with(proxy.through(empty_redis.url), publish_timeout=HANG, **{option: 0.3})
    if option == "read_timeout":
        server.broker.stats()  # it has a connection
        proxy.black_hole(REPLIES)
    else:
        proxy.black_hole()
    before = time.monotonic()

    with pytest.raises(MachineryError, match=r"[Tt]ime"):
        server.broker.purge("nothing") if option == "connect_timeout" else server.broker.put(
            [], token=""
        )

    assert 0.3 <= time.monotonic() - before < HANG / 2
    proxy.heal()
    server.close()


def test_unsent_command_is_given_up_after_the_configured_time(
    empty_redis: RedisServer,
) -> None:
    server = server_with(
        empty_redis.url,
        publish_timeout=HANG,
        write_timeout=0.3,
        connect_timeout=0.3,
        read_timeout=HANG,
    )
    server.broker.stats()
    empty_redis.freeze()
    before = time.monotonic()
    try:
        with pytest.raises(MachineryError):
            server.app.store.broker.driver.ask(b"SET", b"big", b"x" * (64 << 20), doing="sending")  # type: ignore[attr-defined]
        assert time.monotonic() - before < HANG  # one wait to send, and one to connect again
    finally:
        empty_redis.thaw()
    server.close()


def test_no_more_connections_than_may_be_are_opened(empty_redis: RedisServer) -> None:
    driver = RedisDriver(empty_redis.url, limits=PoolLimits(max_active=2))
    first, second = driver.open(), driver.open()

    with pytest.raises(
        BackendUnavailable,
        match=r"redis.max_active: 2 connections are in use \(raise it, or set redis.wait\)",
    ):
        ping(driver)

    first.close()
    first.close()  # counts once
    ping(driver)
    ping(driver)
    with pytest.raises(BackendUnavailable, match="max_active"):
        together(2, lambda _: driver.ask(b"BLPOP", b"nothing", b"1", doing="asking"))
    second.close()
    driver.close()


def test_waiting_caller_gets_a_returned_connection(empty_redis: RedisServer) -> None:
    driver = RedisDriver(empty_redis.url, limits=PoolLimits(max_active=2, wait=True))
    most: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            most.append(len(clients(empty_redis, "machinery")))

    thread = threading.Thread(target=look)
    thread.start()
    together(8, lambda _: [ping(driver) for _ in range(100)])
    over.set()
    thread.join(HANG)

    assert max(most) <= 2
    opened = int(str(empty_redis.cli("CLIENT", "LIST")).count("name=machinery"))
    assert opened <= 2
    links = [driver.open(), driver.open()]  # the idle ones make room
    threading.Timer(0.2, links[0].close).start()
    ping(driver)
    links[1].close()
    driver.close()


def test_a_worker_runs_within_its_connections(empty_redis: RedisServer) -> None:
    server = server_with(empty_redis.url, max_active=6, wait=True)
    double = server.register_task("double", lambda n: 2 * n)
    with server.new_worker(concurrency=4):
        results = [double.send(number) for number in range(100)]
        assert [result.get(timeout=HANG) for result in results] == [
            2 * number for number in range(100)
        ]
        assert len(clients(empty_redis, "machinery")) <= 6
    server.close()


def test_idle_connections_beyond_limit_or_age_are_closed(
    empty_redis: RedisServer,
) -> None:
    driver = RedisDriver(empty_redis.url, limits=PoolLimits(max_idle=1, idle_timeout=0.2))
    together(4, lambda _: driver.ask(b"BLPOP", b"nothing", b"0.3", doing="asking"))
    wait_until(lambda: len(clients(empty_redis, "machinery")) == 1, HANG, "one that is kept")
    [before] = clients(empty_redis, "machinery")

    ping(driver)
    assert clients(empty_redis, "machinery")[0].split()[0] == before.split()[0]
    # Redis counts whole seconds from one tick of its clock to another: "1" may be a moment.
    wait_until(
        lambda: " idle=2 " in clients(empty_redis, "machinery")[0],
        HANG,
        "a connection that is idle",
    )
    ping(driver)
    [after] = clients(empty_redis, "machinery")

    assert after.split()[0] != before.split()[0]
    driver.close()


def test_a_shorter_poll_period_is_kept(empty_redis: RedisServer) -> None:
    server = server_with(empty_redis.url, normal_tasks_poll_period=50)
    with server.new_worker(concurrency=1) as worker:
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
        empty_redis.cli("CONFIG", "RESETSTAT")

        def sleeps() -> int:
            lines = str(empty_redis.cli("INFO", "commandstats")).splitlines()
            return next(
                (
                    int(line.partition("calls=")[2].partition(",")[0])
                    for line in lines
                    if "cmdstat_blmove" in line
                ),
                0,
            )

        before = time.monotonic()
        wait_until(lambda: sleeps() > 20, HANG, "twenty sleeps")
        assert time.monotonic() - before < 19.0  # with the default a second each
    server.close()


def test_a_lost_reply_is_unknown_after_the_read_timeout(
    empty_redis: RedisServer, open_proxy: OpenProxy
) -> None:
    proxy = open_proxy(empty_redis.port)
    server = server_with(proxy.through(empty_redis.url), publish_timeout=1.0, read_timeout=0.2)
    server.send_task(Signature(name="first"))
    proxy.black_hole(REPLIES)

    with pytest.raises(PublishUnknown):
        server.send_task(Signature(name="second"))
    proxy.heal()
    assert empty_redis.cli("LLEN", "machinery_tasks") == 2
    server.close()
