"""Which Redis we connect to: by TLS, sentinels, or out of several; and after one goes away."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from machinery_py import AsyncResult, Config, Server
from machinery_py.config.sections import RedisConfig
from machinery_py.config.server_urls import BadUrl, parse_redis_url
from machinery_py.connections.failover import STRATEGIES, round_robin, shuffle
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.discovery import Servers
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    ConfigError,
    MachineryError,
    StoreUnusable,
)
from machinery_py.tasks.signature import Signature
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.private import free_port
from tests.support.proxy import Proxy
from tests.support.servers import RedisSentinelTrio, RedisServer, require

OpenProxy = Callable[[int], Proxy]


@pytest.fixture(scope="module")
def tls_server() -> Iterator[RedisServer]:
    require(RedisServer)
    with RedisServer(tls=True, password="sesame") as server:
        yield server


@pytest.fixture
def trio() -> Iterator[RedisSentinelTrio]:
    require(RedisSentinelTrio)
    with RedisSentinelTrio() as trio:
        yield trio


@pytest.fixture
def second() -> Iterator[RedisServer]:
    """A server beside the shared one."""
    require(RedisServer)
    with RedisServer() as server:
        yield server


def dead() -> str:
    """A URL where nobody listens."""
    return f"redis://:sesame@127.0.0.1:{free_port()}/0"


def several(*urls: str, **settings: object) -> Server:
    return Server(
        Config.from_mapping(
            {"broker": ";".join(urls), "multiple_broker_separator": ";", **settings}
        )
    )


def send(server: Server, name: str = "nobody_runs_this") -> None:
    server.send_task(Signature(name=name))


def sentinel_url(trio: RedisSentinelTrio, query: str = "?master_name=mymaster") -> str:
    return "redis://" + ",".join(f"{host}:{port}" for host, port in trio.addresses) + f"/0{query}"


def ping(url: str) -> None:
    driver = RedisDriver(url)
    try:
        assert driver.ask(b"PING", doing="asking") == b"PONG"
    finally:
        driver.close()


def refusal(url: str) -> str:
    with pytest.raises(StoreUnusable) as caught:
        ping(url)
    assert "sesame" not in str(caught.value)
    return str(caught.value)


# URLs


def test_sentinels_and_certificates_stand_in_the_url() -> None:
    read = parse_redis_url(
        "rediss://pw@a,b:7/1?master_name=m&sentinel_password=p%40q&ca_file=/etc/ca.pem&verify=none"
    )

    assert read.hosts == (("a", 26379), ("b", 7))
    assert (read.master_name, read.password, read.sentinel_password, read.ca_file) == (
        "m",
        "pw",
        "p@q",
        "/etc/ca.pem",
    )
    assert (read.database, read.tls, read.verify) == (1, True, False)
    assert parse_redis_url("rediss://a").verify


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://a?ca_file=/x", "option 'ca_file' needs TLS"),
        ("rediss://a?verify=never", "expected full or none"),
        ("rediss://a?key_file=k", "needs 'cert_file'"),
        ("rediss://a?ca_file=", "option 'ca_file' is '' .expected a path"),
        ("redis://a?master_name=x&master_name=y", "given twice"),
        ("redis://a?sentinel_password=p@q", "encode it as %40"),
        ("redis+socket:///run/x?master_name=m", "unknown option 'master_name'"),
        ("redis://a,b/1", "2 hosts are a cluster, which has database 0 only"),
    ],
)
def test_options_that_make_no_sense_are_refused(url: str, text: str) -> None:
    with pytest.raises(BadUrl, match=text):
        parse_redis_url(url)
    with pytest.raises(ConfigError):
        Config(broker=url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://a/1", "database 0 only"),
        ("redis://a?master_name=m", "no sentinels"),
        ("redis+socket:///run/x", "no socket"),
        ("redis://a;redis://b", "found several URLs"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(url: str, text: str) -> None:
    config = Config(broker=url, multiple_broker_separator=";", redis=RedisConfig(cluster_mode=True))
    with pytest.raises(ConfigError, match=text):
        send(Server(config), "a")


# TLS


def test_certificate_of_a_named_private_authority_is_trusted(
    tls_server: RedisServer,
) -> None:
    ping(f"{tls_server.url}?ca_file={tls_server.ca_file}")


def test_certificate_of_an_unknown_authority_is_refused(tls_server: RedisServer) -> None:
    assert "certificate verify failed" in refusal(tls_server.url)


def test_files_that_are_no_certificates_are_named(tls_server: RedisServer) -> None:
    assert "certificate file '/nowhere' (ca_file)" in refusal(f"{tls_server.url}?ca_file=/nowhere")
    assert "certificate" in refusal(f"{tls_server.url}?ca_file={tls_server.folder}/server.key")
    assert "certificate" in refusal(
        f"{tls_server.url}?ca_file={tls_server.ca_file}&cert_file={tls_server.folder}/server.key"
    )


def test_disabled_certificate_check_is_warned_of(
    tls_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    ping(f"{tls_server.url}?verify=none")

    assert "certificates are not checked" in caplog.text
    assert "sesame" not in caplog.text


def test_a_server_that_wants_a_certificate_gets_ours() -> None:
    require(RedisServer)
    with RedisServer(tls=True, config={"tls-auth-clients": "optional"}) as server:
        server.cli("CONFIG", "SET", "tls-auth-clients", "yes")
        trusted = f"{server.url}?ca_file={server.ca_file}"

        ping(f"{trusted}&cert_file={server.folder}/server.crt&key_file={server.folder}/server.key")
        with pytest.raises(MachineryError):  # it may close the connection before its reason is read
            ping(trusted)
        server.kill()


# Secrets


def test_wrong_password_is_reported_at_once_and_not_shown(
    tls_server: RedisServer, empty_redis: RedisServer
) -> None:
    trusted = f"{tls_server.url}?ca_file={tls_server.ca_file}"

    assert "invalid username-password" in refusal(trusted.replace("sesame", "sesame-street"))
    assert "Authentication required" in refusal(trusted.replace(":sesame@", ""))
    with pytest.raises(StoreUnusable):
        send(several(trusted.replace("sesame", "wrong"), empty_redis.url), "a")


# Several URLs


def test_no_connection_sends_a_command_that_the_server_refuses(empty_redis: RedisServer) -> None:
    empty_redis.cli("CONFIG", "RESETSTAT")
    server = Server(empty_redis.url)

    server.send_task(Signature(name="nobody_runs_this"))

    refused = {
        line.partition(":")[0] for line in str(empty_redis.cli("INFO", "errorstats")).splitlines()
    }
    assert "errorstat_ERR" not in refused


def test_strategy_gives_the_next_queue() -> None:
    urls = ["a", "b", "c"]

    assert [round_robin(urls, failed) for failed in urls] == ["b", "c", "a"]
    assert {shuffle(urls, "a") for _ in range(100)} == {"b", "c"}
    assert urls == ["a", "b", "c"]


def test_a_dead_first_server_is_passed_without_waiting(
    empty_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = several(dead(), dead(), empty_redis.url)

    before = time.monotonic()
    send(server)

    assert time.monotonic() - before < 3.0  # two thirds of publish_timeout are more
    assert empty_redis.cli("LLEN", "machinery_tasks") == 1
    switches = [
        record.message for record in caplog.records if "switching to redis://" in record.message
    ]
    assert len(switches) == 2
    assert "attempt 1 of 3" in switches[0] and "attempt 2 of 3" in switches[1]
    assert "sesame" not in caplog.text


def test_when_all_are_dead_their_urls_are_told_in_time() -> None:
    first, other = dead(), dead()
    server = several(first, other, publish_timeout=1.0)

    before = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        send(server, "a")

    assert time.monotonic() - before < 4.0  # the default is 5 s
    assert first.replace(":sesame", "***") in str(caught.value)
    assert other.replace(":sesame", "***") in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_servers_are_tried_in_turn_and_round_again() -> None:
    urls = [dead(), dead(), dead()]
    tried: list[str] = []

    def strategy(all_urls: object, failed: str) -> str:
        tried.append(failed)
        return round_robin(urls, failed)

    servers = Servers(urls, timeout=5.0, strategy=strategy)
    for _ in range(2):
        with pytest.raises(Exception, match="none of 3 servers"):
            servers.connect(5.0)

    assert tried == urls * 2
    assert servers.attempts == 6


def test_a_strategy_of_ones_own_is_named_in_the_configuration(
    empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, "last", lambda urls, failed: urls[-1])
    server = several(dead(), dead(), empty_redis.url, broker_failover_strategy="last")

    send(server)

    assert empty_redis.cli("LLEN", "machinery_tasks") == 1


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
def test_a_strategy_that_raises_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setitem(STRATEGIES, "broken", lambda urls, failed: urls[1 // 0])
    urls = [dead().replace("redis://", f"{scheme}://guest") for _ in range(2)]
    with pytest.raises(
        StoreUnusable, match="broker_failover_strategy raised ZeroDivisionError.* after "
    ) as caught:
        send(several(*urls, broker_failover_strategy="broken"))
    assert "sesame" not in str(caught.value)


def test_an_unknown_strategy_and_other_stores_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="broker_failover_strategy: found 'shufle' .*did you mean 'shuffle'"
    ):
        send(several("redis://a", "redis://b", broker_failover_strategy="shufle"), "a")
    with pytest.raises(ConfigError, match="several URLs work with Redis or RabbitMQ only"):
        send(several("memory://", "redis://b"), "a")


def test_a_worker_goes_on_at_the_next_server(second: RedisServer) -> None:
    with RedisServer() as first:
        server = several(first.url, second.url, lease=1.0)
        ran: list[int] = []

        @server.task
        def note(number: int) -> int:
            ran.append(number)
            return number

        with server.new_worker("worker", concurrency=2):
            assert note.send(1).get(timeout=HANG) == 1
            first.kill()
            assert note.send(2).get(timeout=HANG) == 2

    assert ran == [1, 2]
    assert second.cli("LLEN", "machinery_tasks") == 0


def test_a_demoted_server_is_left_for_the_next(
    empty_redis: RedisServer, second: RedisServer
) -> None:
    server = several(second.url, empty_redis.url)
    send(server, "before")

    second.cli("REPLICAOF", "127.0.0.1", free_port())
    send(server, "after")

    assert empty_redis.cli("LLEN", "machinery_tasks") == 1


# One server and its network


def test_a_reset_and_a_refusal_pass(empty_redis: RedisServer, open_proxy: OpenProxy) -> None:
    proxy = open_proxy(empty_redis.port)
    driver = RedisDriver(proxy.through(empty_redis.url))
    assert driver.ask(b"PING", doing="asking") == b"PONG"

    proxy.reset()
    assert driver.ask(b"PING", doing="asking") == b"PONG"

    proxy.refuse()
    proxy.reset()
    with pytest.raises(BackendUnavailable, match="refused"):
        driver.ask(b"PING", doing="asking")

    proxy.heal()
    assert driver.ask(b"PING", doing="asking") == b"PONG"
    driver.close()


def test_a_black_hole_is_noticed_within_the_timeout(
    empty_redis: RedisServer, open_proxy: OpenProxy
) -> None:
    proxy = open_proxy(empty_redis.port)
    driver = RedisDriver(proxy.through(empty_redis.url), timeout=0.5)
    driver.ask(b"PING", doing="asking")
    proxy.black_hole()

    before = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"[Tt]ime"):
        driver.ask(b"PING", doing="asking")

    assert time.monotonic() - before < 4.5  # the reply, and a new connection; the default is 5 s
    driver.close()


def test_a_black_hole_has_no_more_than_its_share_of_the_time(
    empty_redis: RedisServer, open_proxy: OpenProxy
) -> None:
    proxy = open_proxy(empty_redis.port)
    proxy.black_hole()
    server = several(proxy.through(empty_redis.url), empty_redis.url, publish_timeout=4.0)

    before = time.monotonic()
    send(server)

    assert time.monotonic() - before < 4.0


@pytest.mark.parametrize(
    "text",
    ["LOADING Redis is loading", "UNBLOCKED force unblock", "MASTERDOWN Link with MASTER is down"],
)
def test_temporary_error_is_retried(
    text: str, empty_redis: RedisServer, open_proxy: OpenProxy
) -> None:
    proxy = open_proxy(empty_redis.port)
    server = Server(Config(broker=proxy.through(empty_redis.url)))
    send(server, "first")
    proxy.answer_next(text, matching=b"EVALSHA", times=2)

    send(server, "second")

    assert proxy.counts["answered"] == 2
    assert empty_redis.cli("LLEN", "machinery_tasks") == 2


def test_a_worker_can_start_when_its_server_has(second: RedisServer) -> None:
    second.stop()
    server = Server(Config(broker=second.url, publish_timeout=1.0))

    @server.task
    def answer() -> int:
        return 42

    worker = server.new_worker("early", concurrency=1)
    with pytest.raises(BrokerUnavailable, match=f"Redis at 127.0.0.1:{second.port}.*refused"):
        worker.start()
    second.start()
    with worker:
        assert answer.send().get(timeout=HANG) == 42


def test_a_worker_outlives_its_server(second: RedisServer) -> None:
    server = Server(Config(broker=second.url, lease=1.0))

    @server.task
    def answer() -> int:
        return 42

    with server.new_worker("patient", concurrency=1) as worker:
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
        second.kill()
        wait_until(lambda: not worker.ready, HANG, "a worker that misses its server")
        second.start()
        assert answer.send().get(timeout=HANG) == 42


# Sentinel


class Sentinel(RedisServer):
    """One of its own, with a password."""

    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--sentinel"]


def test_sentinels_and_the_master_have_passwords_of_their_own() -> None:
    require(RedisServer)
    with RedisServer(password="sesame") as master:
        watch = {
            "sentinel monitor": f"m 127.0.0.1 {master.port} 1",
            "sentinel auth-pass": "m sesame",
        }
        with Sentinel(password="street", config=watch) as sentinel:
            url = f"redis://:sesame@127.0.0.1:{sentinel.port}/0?master_name=m"

            ping(f"{url}&sentinel_password=street")
            assert "sentinel_password" in refusal(url)
            assert "sentinel_password" in refusal(f"{url}&sentinel_password=wrong")


def test_the_master_is_found_by_way_of_the_sentinels(trio: RedisSentinelTrio) -> None:
    driver = RedisDriver(sentinel_url(trio))
    driver.ask(b"SET", b"key", b"value", doing="writing")
    before = trio.current_master()
    assert driver.servers.place == f"127.0.0.1:{before.port}"

    after = trio.failover()

    def writes() -> bool:
        driver.ask(b"SET", b"key", b"other", doing="writing")
        return after.cli("GET", "key") == "other"

    wait_until(writes, HANG, "writes that go to the new master")
    driver.close()
    with pytest.raises(BackendUnavailable, match="knows no master 'another'"):
        ping(sentinel_url(trio, "?master_name=another"))
    trio.sentinels[0].kill()  # the others are asked
    ping(sentinel_url(trio))


def test_work_goes_on_through_a_failover(trio: RedisSentinelTrio) -> None:
    config = Config(
        broker=sentinel_url(trio, ""),
        redis=RedisConfig(master_name="mymaster"),
        lease=2.0,
        publish_timeout=10.0,
    )
    server = Server(config)
    runs: Counter[int] = Counter()
    open_gate = threading.Event()

    @server.task
    def note(number: int) -> int:
        if number >= 200:
            open_gate.wait(HANG)
        runs[number] += 1
        return number

    with server.new_worker("worker", concurrency=4):
        done = [note.send(number) for number in range(200)]
        assert [result.get(timeout=HANG) for result in done] == list(range(200))
        waiting = [note.send(number) for number in range(200, 400)]
        before = trio.current_master()
        wait_until(lambda: _is_replicated(before), HANG, "replicas that have everything")

        before.kill()
        open_gate.set()
        later = [
            result for number in range(400, 450) if (result := _sent(note.send, number)) is not None
        ]
        after = trio.wait_for_failover(before)

        assert [result.get(timeout=2 * HANG) for result in waiting] == list(range(200, 400))
        assert all(result.get(timeout=2 * HANG) is not None for result in later)
        assert after is not before

    assert all(
        runs[number] == 1 for number in range(200)
    )  # what was settled and replicated does not run again
    assert len(later) > 0


def _sent(send: Callable[[int], AsyncResult[int]], number: int) -> AsyncResult[int] | None:
    """What is sent may be refused while nobody is master; then nothing was stored."""
    try:
        return send(number)
    except MachineryError:
        return None


def _is_replicated(master: RedisServer) -> bool:
    lines = str(master.cli("INFO", "replication")).splitlines()
    facts = {line.partition(":")[0]: line.partition(":")[2] for line in lines}
    return f"offset={facts['master_repl_offset']}," in facts["slave0"] + ","
