"""The tests' private servers start, answer, die, return, freeze, end, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pika
import pytest

from machinery_py.testing.waiting import HANG, together, wait_until
from tests.cli.app import children, is_alive
from tests.support.private import PORTS, free_port
from tests.support.servers import (
    MemcachedServer,
    PrivateServer,
    RabbitMQServer,
    RedisCluster,
    RedisSentinelTrio,
    RedisServer,
    ReplyError,
    ServerBroken,
    ServerMissing,
    require,
)

ROOT = Path(__file__).parents[2]  # from where a child finds tests.support


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    require(RedisServer)
    with RedisServer() as server:
        yield server


def family(pid: int) -> set[int]:
    """A process and all that come from it."""
    return {pid}.union(*(family(child) for child in children(pid)))


# Redis


def test_redis_answers_on_its_own_port_from_its_own_process(redis: RedisServer) -> None:
    assert redis.port in PORTS
    assert redis.url == f"redis://127.0.0.1:{redis.port}/0"
    assert redis.cli("SET", "name", "Ada") == "OK"
    assert redis.cli("GET", "name") == "Ada"
    assert redis.cli("GET", "nothing") is None
    assert redis.cli("RPUSH", "list", b"\xff", 2) == 2
    assert redis.cli("LRANGE", "list", 0, -1) == ["\udcff", "2"]
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        redis.cli("INCR", "list")


def test_starting_a_redis_that_runs_changes_nothing(redis: RedisServer) -> None:
    pid = redis.pid

    redis.start()

    assert redis.pid == pid


def test_a_redis_comes_back_on_its_port_without_its_memory(redis: RedisServer) -> None:
    redis.cli("SET", "a", 1)
    before = redis.pid

    redis.kill()

    assert not is_alive(before)
    assert not redis.is_running
    with pytest.raises(ConnectionRefusedError):
        redis.cli("PING")
    redis.start()
    assert (redis.pid == before, redis.cli("GET", "a")) == (False, None)


def test_an_append_only_file_survives_a_kill() -> None:
    require(RedisServer)
    with RedisServer(appendonly=True) as redis:
        redis.cli("SET", "a", 1)

        redis.kill()
        redis.start()

        assert redis.cli("GET", "a") == "1"


def test_frozen_redis_accepts_and_answers_when_thawed(redis: RedisServer) -> None:
    redis.freeze()
    with socket.create_connection(("127.0.0.1", redis.port), 0.2) as client:
        client.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            client.recv(1)

        redis.thaw()
        client.settimeout(HANG)
        assert client.recv(7) == b"+PONG\r\n"


def test_a_frozen_redis_can_be_restarted(redis: RedisServer) -> None:
    redis.freeze()

    assert redis.restart().cli("PING") == "PONG"


def test_a_closed_redis_leaves_neither_process_nor_file(redis: RedisServer) -> None:
    pid, folder = redis.pid, redis.folder

    redis.close()
    redis.close()

    assert not is_alive(pid)
    assert not folder.exists()


def test_a_redis_with_little_memory_refuses(redis: RedisServer) -> None:
    redis.cli("CONFIG", "SET", "maxmemory", 1)

    with pytest.raises(ReplyError, match="OOM"):
        redis.cli("SET", "a", 1)


def test_a_password_a_socket_and_any_line_of_the_configuration() -> None:
    require(RedisServer)
    with RedisServer(
        password="secret", unix_socket=True, maxmemory="10mb", config={"maxclients": "77"}
    ) as redis:
        assert redis.url == f"redis://:secret@127.0.0.1:{redis.port}/0"
        assert redis.cli("CONFIG", "GET", "maxclients") == ["maxclients", "77"]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(HANG)
            client.connect(str(redis.socket_path))
            client.sendall(b"PING\r\n")
            assert client.recv(100).startswith(b"-NOAUTH")


def test_tls_is_trusted_with_its_ca_and_not_without() -> None:
    require(RedisServer)
    with RedisServer(tls=True) as redis:
        assert redis.url.startswith("rediss://")
        assert redis.cli("PING") == "PONG"
        with (
            socket.create_connection(("127.0.0.1", redis.port), HANG) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")


def test_unknown_configuration_line_is_reported_with_the_log() -> None:
    require(RedisServer)
    with (
        pytest.raises(ServerBroken, match="(?s)ended while starting.*no-such-line"),
        RedisServer(config={"no-such-line": "1"}),
    ):
        pass


def test_eight_servers_start_at_once_and_outlive_their_threads() -> None:
    require(RedisServer)
    servers = [RedisServer() for _ in range(8)]

    def start(number: int) -> threading.Thread:
        servers[number].start()
        return threading.current_thread()

    try:
        starters = together(8, start)

        assert not [thread for thread in starters if thread.is_alive()]
        assert [server.cli("PING") for server in servers] == ["PONG"] * 8
        assert len({server.port for server in servers}) == 8
    finally:
        for server in servers:
            server.close()


HOLDER = """
import sys
from tests.support.servers import RedisServer

redis = RedisServer().start()
print(redis.pid, redis.folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux can be asked to end a process with its parent"
)
def test_a_killed_python_takes_its_servers_along() -> None:
    require(RedisServer)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        words = holder.stdout.readline().split()
        pid, folder = int(words[0]), words[1]
        assert is_alive(pid)

        holder.kill()

        wait_until(lambda: not is_alive(pid))
        shutil.rmtree(folder)  # nobody is left to do that


def test_a_python_that_ends_without_closing_leaves_nothing() -> None:
    require(RedisServer)
    done = subprocess.run(
        [sys.executable, "-c", HOLDER],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )

    pid, folder = done.stdout.split()

    assert not is_alive(int(pid))
    assert not Path(folder).exists()


def test_sentinels_agree_on_a_new_master() -> None:
    require(RedisSentinelTrio)
    with RedisSentinelTrio() as trio:
        first, second = trio.servers
        assert trio.current_master() is first
        assert len(set(trio.addresses)) == 3

        first.kill()

        assert trio.wait_for_failover(first) is second
        assert second.cli("SET", "a", 1) == "OK"


def test_sentinels_change_the_master_on_request() -> None:
    require(RedisSentinelTrio)
    with RedisSentinelTrio() as trio:
        before = trio.current_master()

        assert trio.failover() is not before


def test_a_cluster_survives_the_death_of_a_master() -> None:
    require(RedisCluster)
    with RedisCluster() as cluster:
        owner = cluster.node_of("a")
        assert owner.cli("SET", "a", 1) == "OK"
        with pytest.raises(ReplyError, match="MOVED"):
            next(node for node in cluster.nodes[:3] if node is not owner).cli("GET", "a")

        owner.kill()

        wait_until(lambda: cluster.node_of("a") is not owner)
        assert cluster.node_of("a").is_running
        pids = [node.pid for node in cluster.nodes if node is not owner]
    assert not any(map(is_alive, pids))


# The others


def test_memcached_answers_dies_and_comes_back_empty() -> None:
    require(MemcachedServer)

    def ask(words: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), HANG) as client:
            client.sendall(words)
            return client.recv(100)

    with MemcachedServer(megabytes=1) as server:
        assert server.url == f"memcache://127.0.0.1:{server.port}"
        assert ask(b"set a 0 0 1\r\n1\r\n") == b"STORED\r\n"
        assert ask(b"get a\r\n") == b"VALUE a 0 1\r\n1\r\nEND\r\n"
        server.kill()
        server.start()
        assert ask(b"get a\r\n") == b"END\r\n"
        pid = server.pid
    assert not is_alive(pid)


def test_rabbitmq_server_keeps_messages_over_a_kill() -> None:
    require(RabbitMQServer)
    before = family(os.getpid())
    with RabbitMQServer() as server:
        with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("mail", durable=True)
            channel.basic_publish("", "mail", b"x", pika.BasicProperties(delivery_mode=2))
        assert server.ctl("list_queues", "name", "messages").split() == [
            "name",
            "messages",
            "mail",
            "1",
        ]
        # RabbitMQ 3 writes a new queue's existence down later; RabbitMQ 4 has another store for it.
        server.ctl("eval", "mnesia:system_info(is_running) =:= no orelse (ok = mnesia:sync_log()).")
        processes = family(server.pid)

        server.freeze()
        server.thaw()
        server.kill()
        wait_until(
            lambda: not any(map(is_alive, processes)),
            what="the end of all that RabbitMQ had started",
        )
        server.start()

        with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
            assert connection.channel().basic_get("mail", auto_ack=True)[2] == b"x"
        with pytest.raises(ServerBroken, match="no_such_command"):
            server.ctl("no_such_command")
        processes = family(os.getpid()) - before
        assert len(processes) > 2
        server.stop()
    wait_until(
        lambda: not any(map(is_alive, processes)), what="the end of all that RabbitMQ had started"
    )


# What is not there


class NoSuchServer(PrivateServer):
    PROGRAMS: ClassVar[Mapping[str, str]] = {"no-such-program": "no-such-package"}

    def command(self) -> list[str]:
        return [self.find("no-such-program")]

    def _answers(self) -> bool:
        return False


def test_a_missing_program_says_its_package() -> None:
    with pytest.raises(
        ServerMissing, match="'no-such-program' is not installed .Debian package 'no-such-package'"
    ) as raised:
        NoSuchServer().start()

    assert raised.value.package == "no-such-package"


def test_a_missing_program_skips_on_a_laptop_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-package"):
        require(NoSuchServer)

    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-package"):
        require(NoSuchServer)


def test_unstarted_server_has_no_pid_and_can_be_closed() -> None:
    server = MemcachedServer()

    with pytest.raises(ServerBroken, match=r"not running \(call start"):
        server.freeze()
    server.close()

    assert not server.folder.exists()


def test_a_port_is_given_once_and_is_free() -> None:
    ports = [free_port(besides=10_000) for _ in range(50)]

    assert len(set(ports)) == 50
    with (
        socket.create_server(("127.0.0.1", ports[0])),
        socket.create_server(("127.0.0.1", ports[0] + 10_000)),
    ):
        pass
