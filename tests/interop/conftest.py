"""Stores that both languages know, a Python worker, and Go peers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pika
import pytest
from pymongo import MongoClient

from machinery_py import Server
from tests.interop.fleet import new_server
from tests.interop.golang import VERSIONS, Peer
from tests.interop.relay import Relay
from tests.support import private_mongo
from tests.support.servers import RabbitMQServer, require

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))


class Fleet:
    """One pair of stores, with servers, workers and Go peers on it; all of them end with the test.

    Attributes:
        go_fires_once: Go workers among themselves settle a chord once. Go's MongoDB backend does
            not ask whether the group was settled, and with memcached two may ask at the same
            moment: of members that end together, each sends the callback.
        keeps_order: the callback that Go sends has the results in the order of the group.
        is_quick: hundreds of chords take seconds.
    """

    def __init__(self, version: str, broker: str, backend: str, stack: ExitStack) -> None:
        self.version = version
        self.broker = broker
        self.backend = backend
        self._stack = stack
        self.go_fires_once = not backend.startswith(("mongodb", "memcache"))
        self.keeps_order = not backend.startswith("mongodb")
        self.is_quick = broker == backend

    def needs_all_types(self) -> None:
        """Leave the test out where Go programs cannot read what they themselves have stored."""
        if self.backend.startswith("mongodb"):
            pytest.skip(
                "left out: in MongoDB Go reads only int64, floats, bool, string and lists of these"
            )

    def needs_types(self) -> None:
        """Skip where Go reads results or a retried task from a store that changes types."""
        if self.backend.startswith("mongodb") and private_mongo.best_kind() != "mongod":
            pytest.skip(
                "left out: this stand-in for MongoDB makes int64 to int32, "
                "and some dates to texts; Go refuses both"
            )

    def python(self, **options: Any) -> Server:
        server = new_server(self.broker, backend=self.backend, **options)
        self._stack.callback(server.close)
        return server

    def python_worker(
        self, server: Server | None = None, *queues: str, concurrency: int = 4
    ) -> Server:
        """A server with a worker that runs until the test is over."""
        server = server or self.python()
        self._stack.enter_context(server.new_worker("python", concurrency, queues=queues))
        return server

    def go(self, **flags: object) -> Peer:
        return self._stack.enter_context(
            Peer(self.version, broker=self.broker, backend=self.backend, **flags)
        )

    def go_worker(self, queue: str = "", *, concurrency: int = 4, **flags: object) -> Peer:
        """On RabbitMQ Go binds each queue by the binding key.

        A queue without a key of its own would get a copy of all default tasks.
        """
        peer = self.go(
            **{"binding_key": queue, **flags} if queue and self.broker.startswith("amqp") else flags
        )
        peer.ask("worker", queue=queue, concurrency=concurrency)
        return peer


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


#: The pairs that Go Machinery has as well. `make chaos` tries everything on all of them.
STORES = ("redis+redis", "redis+mongodb", "amqp+redis", "redis+memcache", "amqp+memcache")
FLEETS = [(stores, version) for stores in STORES for version in VERSIONS]
#: Where not FULL: what all tests run on, and what some also run on. Go's RabbitMQ broker and its
#: MongoDB backend are all but the same in both versions.
BRIEF = [
    ("redis+redis", "v1"),
    ("redis+redis", "v2"),
    ("redis+mongodb", "v2"),
    ("amqp+redis", "v2"),
]
ALSO = {
    "tests.interop.test_chords": [
        ("redis+mongodb", "v1"),
        ("amqp+redis", "v1"),
        ("redis+memcache", "v2"),
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fleet" in metafunc.fixturenames:
        fleets = FLEETS if FULL else BRIEF + ALSO.get(metafunc.module.__name__, [])
        if metafunc.module.__name__ == "tests.interop.test_workflows":
            fleets = [(stores, one) for stores, one in fleets if stores == "redis+redis"]
        metafunc.parametrize("fleet", fleets, ids="-".join, indirect=True)


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet on a pair of stores, with one version of Go Machinery."""
    stores, version = request.param
    broker, backend = (_url(request, kind) for kind in stores.split("+"))
    with ExitStack() as stack:
        yield Fleet(version, broker, backend, stack)


def _url(request: pytest.FixtureRequest, kind: str) -> str:
    if kind == "redis":
        return str(request.getfixturevalue("empty_redis").url)
    if kind == "mongodb":
        return str(request.getfixturevalue("go_mongodb_url"))
    if kind == "amqp":
        return str(request.getfixturevalue("go_amqp_url"))
    if kind == "memcache":
        return str(request.getfixturevalue("empty_memcached").url)
    raise AssertionError(kind)


QUEUES = (
    "machinery_tasks",
    "machinery_task",
    "of_go",
    "of_python",
    "of_both",
    "counted",
    "ticks",
    "none",
)


@pytest.fixture
def go_amqp_url(rabbitmq_server: RabbitMQServer) -> str:
    """RabbitMQ without these tests' queues.

    The queues for delayed messages stay: making them takes longer than a test.
    """
    with closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_server.url))) as connection:
        channel = connection.channel()
        for queue in QUEUES:
            channel.queue_delete(queue)
            channel.queue_delete(f"machinery.dead.{queue}")
    return rabbitmq_server.url


@pytest.fixture(scope="session")
def private_mongodb() -> Iterator[str]:
    """A private server, always: Go Machinery knows only the database `machinery`, emptied here."""
    kind = private_mongo.KINDS[private_mongo.best_kind()]
    require(kind)
    with kind() as server:
        if private_mongo.best_kind() == "mongod":
            yield server.url
        else:
            with Relay(server.port) as relay:
                yield f"mongodb://127.0.0.1:{relay.port}/"


@pytest.fixture
def go_mongodb_url(private_mongodb: str) -> Iterator[str]:
    with MongoClient(private_mongodb, serverSelectionTimeoutMS=5000) as client:
        client.drop_database("machinery")
        yield f"{private_mongodb}machinery"
        client.drop_database("machinery")
