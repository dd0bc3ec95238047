"""Stores that both languages know, a Python worker, and Go peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from machinery_py import Server
from machinery_py.testing.servers import RedisServer
from tests.interop.fleet import new_server
from tests.interop.golang import VERSIONS, Peer


class Fleet:
    """One pair of stores, with servers, workers and Go peers on it; all of them end with the test."""

    def __init__(self, version: str, broker: str, backend: str, stack: ExitStack) -> None:
        self.version = version
        self.broker = broker
        self.backend = backend
        self._stack = stack

    def python(self, **options: Any) -> Server:
        server = new_server(self.broker, backend=self.backend, **options)
        self._stack.callback(server.close)
        return server

    def python_worker(self, server: Server | None = None, *queues: str, concurrency: int = 4) -> Server:
        """A server with a worker that runs until the test is over."""
        server = server or self.python()
        self._stack.enter_context(server.new_worker("python", concurrency, queues=queues))
        return server

    def go(self, **flags: object) -> Peer:
        return self._stack.enter_context(Peer(self.version, broker=self.broker, backend=self.backend, **flags))

    def go_worker(self, queue: str = "", *, concurrency: int = 4, **flags: object) -> Peer:
        peer = self.go(**flags)
        peer.ask("worker", queue=queue, concurrency=concurrency)
        return peer


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def redis_fleet(version: str, empty_redis: RedisServer) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(version, empty_redis.url, empty_redis.url, stack)


FleetMaker = Callable[[], Fleet]
STORES = ("redis+redis",)


@pytest.fixture(params=STORES)
def fleet(request: pytest.FixtureRequest, version: str) -> Iterator[Fleet]:
    """A fleet on each pair of stores that Go Machinery has as well."""
    broker, backend = (_url(request, kind) for kind in str(request.param).split("+"))
    with ExitStack() as stack:
        yield Fleet(version, broker, backend, stack)


def _url(request: pytest.FixtureRequest, kind: str) -> str:
    if kind == "redis":
        return str(request.getfixturevalue("empty_redis").url)
    raise AssertionError(kind)
