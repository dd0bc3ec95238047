"""A process forks while its threads are in the library, as a task does that uses multiprocessing: the child can send as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py._drivers.amqp import AmqpDriver
from machinery_py.clock import SystemClock
from machinery_py.forks import ForkLock
from machinery_py.states import State
from machinery_py.testing.proxy import Proxy
from machinery_py.testing.servers import RabbitMQServer
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.forking import forked
from tests.servers import open_proxy, rabbitmq_server
from tests.stores.amqp_case import amqp_url, vhosts
from tests.stores.memcache_case import empty_memcached
from tests.stores.mongo_case import mongodb_server, mongodb_url

__all__ = ["amqp_url", "empty_memcached", "mongodb_server", "mongodb_url", "open_proxy", "rabbitmq_server", "vhosts"]

FORKS = 8


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


@pytest.mark.parametrize("pair", ["sqlite+sqlite", "redis+redis", "amqp+amqp", "amqp+redis", "redis+memcache"])
def test_a_child_sends_that_was_forked_while_threads_send(pair: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    def url_of(kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path}/machinery.db?synchronous=normal"
        given = request.getfixturevalue({"redis": "empty_redis", "memcache": "empty_memcached", "amqp": "amqp_url"}[kind])
        return str(getattr(given, "url", given))

    broker, backend = pair.split("+")
    send_and_fork(url_of(broker), url_of(backend))


def test_a_child_sends_to_mongodb_that_was_forked_while_threads_send(mongodb_url: str) -> None:
    send_and_fork(mongodb_url, mongodb_url)


def test_a_child_connects_to_rabbitmq_that_was_forked_while_a_thread_was_connecting(
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
