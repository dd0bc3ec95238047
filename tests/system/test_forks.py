"""A process forks while its threads are in the library; the child can send as well.

A task that uses multiprocessing does this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from machinery_py import Config, Server
from machinery_py.clock import SystemClock
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.tasks.states import State
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.cli.app import HANG as LONG
from tests.cli.app import TASKS, App, app_in_a_folder, children, is_alive
from tests.support.fixtures import url_of
from tests.support.forking import forked
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQServer

FORKS = 8

app = app_in_a_folder

FORKING = (
    TASKS
    + """
import multiprocessing, subprocess, sys

def square(number: int) -> int:
    return number * number

@server.task
def squares(how: str) -> int:
    with multiprocessing.get_context(how).Pool(2) as pool:
        return sum(pool.map(square, range(5)))

@server.task
def leave(how: str) -> None:
    if how == "popen":
        pid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
    elif how == "os.fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
            os._exit(0)
    else:
        process = multiprocessing.get_context(how).Process(target=time.sleep, args=(1000,))
        process.start()
        pid = process.pid
    with open(HERE / "notes.txt", "a") as file:
        file.write(f"{how} {pid}\\n")
"""
)
FORKED = ("os.fork", "fork")
EXECUTED = ("popen", "spawn", "forkserver")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_child_finds_a_lock_free_that_another_thread_held(reentrant: bool) -> None:
    lock = ForkLock(reentrant=reentrant)
    held, done = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        with lock:
            held.set()
            assert done.wait(HANG)

    def enter() -> bool:
        with lock:
            return True

    def fork(_: int) -> None:
        assert held.wait(HANG)
        try:
            forked(enter)
        finally:
            done.set()

    together(2, lambda index: (hold, fork)[index](index))
    assert enter()


def send_and_fork(broker: str, backend: str) -> None:
    """Two threads send while a third forks; each child sends as well."""
    server = Server(Config(broker=broker, result_backend=backend))

    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    def is_sent() -> bool:
        return add.send(1, 2).get_state().state is State.PENDING

    forks_are_over = threading.Event()

    def work(index: int) -> None:
        if index:
            while not forks_are_over.is_set():
                assert is_sent()
            return
        try:
            for _ in range(FORKS):
                forked(is_sent)
        finally:
            forks_are_over.set()

    try:
        together(3, work)
    finally:
        server.close()


@pytest.mark.parametrize(
    "pair",
    [
        "sqlite+sqlite",
        "postgresql+postgresql",
        "redis+redis",
        "amqp+amqp",
        "amqp+redis",
        "redis+memcached",
    ],
)
def test_child_forked_while_threads_send_can_send(
    pair: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = f"{tmp_path}/machinery.db?synchronous=normal"
    broker, backend = (url_of(kind, file, request) for kind in pair.split("+"))
    send_and_fork(broker, backend)


def test_child_forked_while_threads_send_sends_to_mongodb(mongodb_url: str) -> None:
    send_and_fork(mongodb_url, mongodb_url)


def test_child_forked_during_a_connect_connects_to_rabbitmq(
    rabbitmq_server: RabbitMQServer, amqp_url: str, open_proxy: Callable[[int], Proxy]
) -> None:
    proxy = open_proxy(rabbitmq_server.port)
    driver = AmqpDriver(proxy.through(amqp_url), clock=SystemClock(), timeout=HANG)
    proxy.black_hole()
    thread = threading.Thread(target=lambda: driver.publisher)
    thread.start()
    try:
        wait_until(lambda: proxy.open_connections == 1)
        forked(lambda: driver.publisher.is_open, meanwhile=proxy.heal)
    finally:
        thread.join(HANG)
        driver.close()
    assert not thread.is_alive()


# What tasks fork


@pytest.mark.parametrize(
    "pair", ["redis+redis", "amqp+amqp", "amqp+redis", "redis+memcache", "postgres+postgres"]
)
def test_a_child_has_no_connection_of_its_worker(pair: str, request: pytest.FixtureRequest) -> None:
    urls = [
        str(getattr(given, "url", given))
        for kind in pair.split("+")
        for given in [
            request.getfixturevalue(
                {
                    "redis": "empty_redis",
                    "memcache": "empty_memcached",
                    "amqp": "amqp_url",
                    "postgres": "postgres_url",
                }[kind]
            )
        ]
    ]
    ports = {urlsplit(url).port for url in urls}
    server = Server(Config(broker=urls[0], result_backend=urls[1]))
    add = server.register_task("add", _add)
    try:
        with server.new_worker(concurrency=2):
            assert add.send(1, 2).get(timeout=HANG) == 3
            assert ports & peers()

            forked(lambda: not ports & peers())

            assert add.send(1, 2).get(timeout=HANG) == 3
    finally:
        server.close()


def _add(a: int, b: int) -> int:
    return a + b


def peers() -> set[int | None]:
    """The ports to which this process has connections."""
    found: set[int | None] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                address = one.getpeername()
        except OSError:
            continue  # no socket, or not connected
        if isinstance(address, tuple):
            found.add(address[1])
    return found


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_task_may_use_multiprocessing(app: App, processes: str) -> None:
    app.write("tasks.py", FORKING)
    worker = app.worker("-p", processes, "-c", "1")

    uuids = [app.send("squares", how) for how in ("fork", "spawn", "forkserver")]

    wait_until(lambda: [app.state(uuid) for uuid in uuids] == ["SUCCESS"] * 3, LONG)
    assert worker.process.poll() is None
    assert "stopping" not in worker.err
    assert worker.stop() == 0


def left_behind(app: App, hows: tuple[str, ...]) -> list[int]:
    """Have tasks leave processes behind; their numbers."""
    for how in hows:
        app.send("leave", how)
    wait_until(lambda: len(app.notes) == len(hows), LONG)
    pids = [pid for _, pid in app.notes]
    assert all(map(is_alive, pids))
    return pids


@pytest.mark.parametrize("processes", ["1", "2"])
def test_leftover_of_a_task_ends_with_its_worker(app: App, processes: str) -> None:
    app.write("tasks.py", FORKING)
    worker = app.worker("-p", processes, "-c", "1")
    pids = left_behind(app, FORKED + EXECUTED)

    assert worker.stop() == 0

    assert not any(map(is_alive, pids))


def test_child_forked_before_the_command_line_ran_is_left_alone(app: App) -> None:
    app.write(
        "embedding.py",
        """
import subprocess, sys
from machinery_py.cli.main import main

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
assert main(["worker", "tasks", "--burst", "-c", "1"]) == 0
child.communicate("go on")
print(child.returncode)
""",
    )

    assert app.python("embedding.py").splitlines()[-1] == "0"


def test_leftover_of_a_task_ends_with_its_killed_process(app: App) -> None:
    app.write("tasks.py", FORKING)
    worker = app.worker("-p", "2", "-c", "1")
    pids = left_behind(app, FORKED + EXECUTED)

    for pid in children(worker.pid):
        os.kill(pid, signal.SIGKILL)

    wait_until(lambda: not any(map(is_alive, pids)), LONG)
    assert worker.stop() == 0


def test_child_of_a_task_ends_with_its_killed_worker(app: App) -> None:
    app.write("tasks.py", FORKING)
    worker = app.worker("-c", "1")
    pids = left_behind(app, FORKED)

    worker.close()

    wait_until(lambda: not any(map(is_alive, pids)), LONG)


def test_child_of_a_task_ends_when_all_processes_are_killed(app: App) -> None:
    app.write("tasks.py", FORKING)
    worker = app.worker("-p", "2", "-c", "1")
    pids = left_behind(app, FORKED)

    for pid in (worker.pid, *children(worker.pid)):
        os.kill(pid, signal.SIGKILL)

    wait_until(lambda: not any(map(is_alive, pids)), LONG)


def test_a_forked_child_does_not_hold_the_health_port(app: App) -> None:
    app.write("tasks.py", FORKING)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    worker = app.worker("-c", "1", "--health-port", str(port))
    (pid,) = left_behind(app, ("os.fork",))

    def has_sockets() -> bool:
        links: list[str] = []
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # it has closed one meanwhile
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        return any(link.startswith("socket:") for link in links)

    wait_until(lambda: not has_sockets(), LONG)  # its parent is told of it before it closes them
    assert worker.stop() == 0
