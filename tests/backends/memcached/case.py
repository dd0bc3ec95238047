"""An empty private memcached, and a clock that moves the server's time, for the Memcache tests."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator, Sequence

import pytest

from machinery_py.config.server_urls import parse_memcache_url
from machinery_py.connections.memcached.client import (
    LineCommand,
    MemcacheDriver,
    delete,
    seconds,
    touch,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG
from tests.support.servers import MemcachedServer


def tell(server: MemcachedServer, *lines: bytes) -> list[bytes]:
    """Send lines, each of which has one line for a reply, and return the replies."""
    with (
        socket.create_connection(("127.0.0.1", server.port), HANG) as connection,
        connection.makefile("rb") as stream,
    ):
        connection.sendall(b"".join(line + b"\r\n" for line in lines))
        return [stream.readline().strip() for _ in lines]


def time_left(server: MemcachedServer, keys: Iterable[bytes]) -> dict[bytes, float]:
    """The seconds that each key will be kept, of those that are there."""
    keys = list(keys)
    replies = (
        zip(keys, tell(server, *(b"mg %b t" % key for key in keys)), strict=True) if keys else ()
    )
    left = {key: reply.removeprefix(b"HD t") for key, reply in replies if reply.startswith(b"HD t")}
    return {key: math.inf if text == b"-1" else float(text) for key, text in left.items()}


def put(key: bytes, value: bytes, expiry: bytes) -> LineCommand:
    """Write over what there is."""
    return LineCommand(key, b"set %b 0 %b %d\r\n%b\r\n" % (key, expiry, len(value), value))


class NotingDriver(MemcacheDriver):
    """Records the keys it writes: a server that evicts does not list them reliably."""

    written: set[bytes]

    def send(self, commands: Sequence[LineCommand], *, doing: str) -> list[bytes]:
        self.written.update(command.key for command in commands)
        return super().send(commands, doing=doing)


class ServerClock(ManualClock):
    """Tells the backend the time, and lets what it gave an expiry grow older."""

    def __init__(self, *servers: MemcachedServer) -> None:
        super().__init__()
        self.servers = servers
        self.written: set[bytes] = set()

    def advance(self, seconds: float = 0.0, **more: float) -> None:
        before = self.now()
        super().advance(seconds, **more)
        passed = (self.now() - before).total_seconds()
        for server in self.servers:
            _age(server, self.written, passed)


def _age(server: MemcachedServer, keys: Iterable[bytes], passed: float) -> None:
    driver = MemcacheDriver(parse_memcache_url(server.url))
    kept = {key: left for key, left in time_left(server, keys).items() if left != math.inf}
    driver.send(
        [
            touch(key, seconds(left - passed)) if left > passed else delete(key)
            for key, left in kept.items()
        ],
        doing="ageing",
    )
    driver.close()


class Drivers:
    """Each call opens connections of its own, as another process would."""

    def __init__(self, clock: ServerClock) -> None:
        self._addresses = [
            address for server in clock.servers for address in parse_memcache_url(server.url)
        ]
        self._clock = clock
        self._open: list[MemcacheDriver] = []

    def __call__(self) -> MemcacheDriver:
        driver = NotingDriver(self._addresses, clock=self._clock)
        driver.written = self._clock.written
        self._open.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._open:
            driver.close()


@pytest.fixture
def clock(empty_memcached: MemcachedServer) -> ServerClock:
    return ServerClock(empty_memcached)


@pytest.fixture
def open_driver(clock: ServerClock) -> Iterator[Drivers]:
    drivers = Drivers(clock)
    yield drivers
    drivers.close()
