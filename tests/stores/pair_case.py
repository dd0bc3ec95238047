"""Two stores of any two kinds, for the suites that are run over pairs of broker and result backend.

place("redis", "broker")     a fixture `broker_place`: where an empty store of that kind is
open_side(place)             that store as one side of a pair, with a clock of its own
PairClock(one, other)        time that passes in both
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from machinery_py.backends.base import Backend
from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.backends.postgresql import PostgreSQLBackend
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.base import Broker
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.brokers.postgresql import PostgreSQLBroker
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.sqlite.broker import SQLiteBroker, SQLiteConsumer
from machinery_py.config.config import AMQPConfig
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Session, Store
from machinery_py.stores.outbox import TwoSession
from machinery_py.testing.clocks import ManualClock
from tests.backends.memcached import case as memcached_case
from tests.backends.rabbitmq import case as rabbitmq_results_case
from tests.stores.mongodb import case as mongodb_case
from tests.stores.postgresql import test_conformance as test_postgresql_conformance
from tests.stores.rabbitmq import case as rabbitmq_case
from tests.stores.redis import case as redis_case
from tests.stores.sqlite import test_conformance as test_sqlite_conformance
from tests.support.fixtures import Vhosts
from tests.support.servers import MemcachedServer, RedisServer

#: Every pair, not only a few: `make matrix` and `make chaos`.
ALL_PAIRS = bool(os.environ.get("MACHINERY_TEST_FULL") or os.environ.get("MACHINERY_TEST_PAIRS"))

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Place:
    """An empty store."""

    kind: str
    url: str
    memcached: MemcachedServer | None = None


def place(kind: str, role: str) -> object:
    """A fixture. What it asks for it names, since a server may have parameters."""

    def memory(self: object) -> Place:
        return Place(kind, f"memory://pair-{role}-{next(_numbers)}")

    def sqlite(self: object, tmp_path: Path) -> Place:
        return Place(kind, f"sqlite:///{tmp_path}/{role}.db?synchronous=normal")

    def redis(self: object, empty_redis: RedisServer) -> Place:
        return Place(kind, empty_redis.url)

    def mongodb(self: object, mongodb_url: str) -> Place:
        return Place(kind, mongodb_url)

    def postgresql(self: object, postgres_url: str) -> Place:
        return Place(kind, postgres_url)

    def amqp(self: object, vhosts: Vhosts) -> Iterator[Place]:
        url = vhosts()  # results by themselves: tests call tasks and queues by the same short names
        yield Place(kind, url)
        vhosts.give_back(url)

    def memcache(self: object, empty_memcached: MemcachedServer) -> Place:
        return Place(kind, empty_memcached.url, empty_memcached)

    kinds: dict[str, Callable[..., object]] = {
        function.__name__: function
        for function in (memory, sqlite, postgresql, redis, mongodb, amqp, memcache)
    }
    return pytest.fixture(name=f"{role}_place")(kinds[kind])


@dataclass(frozen=True)
class Side:
    """One store of a pair. What it opens has connections of its own, as another process would."""

    clock: ManualClock
    close: Callable[[], object]
    open_broker: Callable[[], Broker] | None = None
    open_backend: Callable[[], Backend] | None = None


def open_side(place: Place) -> Side:
    return _KINDS[place.kind](place)


def _memory(place: Place) -> Side:
    clock = ManualClock()
    hub = MemoryRows(clock)
    broker, backend = MemoryBroker(hub), MemoryBackend(hub)
    return Side(clock, lambda: None, lambda: broker, lambda: backend)


def _sqlite(place: Place) -> Side:
    path = Path(place.url.removeprefix("sqlite:///").partition("?")[0])
    clock = ManualClock()
    drivers = test_sqlite_conformance.Drivers(path, clock)
    return Side(
        clock, drivers.close, lambda: SQLiteBroker(drivers()), lambda: SQLiteBackend(drivers())
    )


def _postgresql(place: Place) -> Side:
    clock = ManualClock()
    drivers = test_postgresql_conformance.Drivers(place.url, clock)
    return Side(
        clock,
        drivers.close,
        lambda: PostgreSQLBroker(drivers()),
        lambda: PostgreSQLBackend(drivers()),
    )


def _redis(place: Place) -> Side:
    clock = redis_case.ServerClock(place.url)
    drivers = redis_case.Drivers(place.url, clock)

    def close() -> None:
        drivers.close()
        clock.close()

    return Side(clock, close, lambda: RedisBroker(drivers()), lambda: RedisBackend(drivers()))


def _mongodb(place: Place) -> Side:
    clock = ManualClock()
    drivers = mongodb_case.Drivers(place.url, clock)
    return Side(
        clock, drivers.close, lambda: MongoBroker(drivers()), lambda: MongoBackend(drivers())
    )


def _amqp(place: Place) -> Side:
    clock = rabbitmq_case.PacedClock(place.url)
    brokers = rabbitmq_case.Brokers(place.url, clock, AMQPConfig())
    backends = rabbitmq_results_case.Backends(place.url, clock)

    def close() -> None:
        brokers.close()
        backends.close()

    return Side(clock, close, brokers, backends)


def _memcache(place: Place) -> Side:
    assert place.memcached is not None
    clock = memcached_case.ServerClock(place.memcached)
    drivers = memcached_case.Drivers(clock)
    return Side(clock, drivers.close, None, lambda: MemcacheBackend(drivers()))


_KINDS: dict[str, Callable[[Place], Side]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgresql": _postgresql,
    "redis": _redis,
    "mongodb": _mongodb,
    "amqp": _amqp,
    "memcache": _memcache,
}


class PairClock(ManualClock):
    """Both sides' clocks in step with one."""

    def __init__(self, *parts: ManualClock) -> None:
        super().__init__()
        self._parts = parts

    def advance(self, seconds: float = 0.0, **more: float) -> None:
        super().advance(seconds, **more)
        for part in self._parts:
            part.advance(seconds, **more)

    def set_back(self, seconds: float) -> None:
        super().set_back(seconds)
        for part in self._parts:
            part.set_back(seconds)


def dies_at_once(store: Store, session: Session) -> bool:
    """Let the session die as its process would; False: only missing heartbeats show it."""
    assert isinstance(session, TwoSession)
    consumer = session.consumer
    if isinstance(store.broker, AMQPBroker):
        rabbitmq_case.crash(store.broker, consumer)  # type: ignore[arg-type]  # it is this broker's
    elif isinstance(consumer, SQLiteConsumer):
        consumer.abandon()
        store.tend()
    else:
        return False
    return True
