"""The tests' private servers start, answer, die, return, freeze, end, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from machinery_py.testing.waiting import HANG, together, wait_until
from tests.cli.app import children, is_alive
from tests.support.private import free_port
from tests.support.servers import (
    MemcachedServer,
    PrivateServer,
    RabbitMQServer,
    RedisServer,
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


def test_a_closed_redis_leaves_neither_process_nor_file(redis: RedisServer) -> None:
    pid, folder = redis.pid, redis.folder

    redis.close()
    redis.close()

    assert not is_alive(pid)
    assert not folder.exists()


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


# The others


def test_rabbitmq_ends_with_all_that_it_had_started() -> None:
    require(RabbitMQServer)
    before = family(os.getpid())
    with RabbitMQServer() as server:
        with pytest.raises(ServerBroken, match="no_such_command"):
            server.ctl("no_such_command")
        processes = family(server.pid)

        server.freeze()
        server.thaw()
        server.kill()

        what = "the end of all that RabbitMQ had started"
        wait_until(lambda: not any(map(is_alive, processes)), what=what)
    wait_until(lambda: family(os.getpid()) <= before, what=what)  # epmd is its brother


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
