"""Fixtures: one private server of each kind for the whole run, and proxies.

A missing program skips the test, or fails it with CI set.

A test that kills a server takes its own (`with RedisServer() as redis`), or restarts the shared
one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Config, Server
from machinery_py.testing.waiting import HANG, wait_until
from tests.support import private_mongo
from tests.support.proxy import Proxy
from tests.support.servers import (
    MemcachedServer,
    PostgreSQLServer,
    RabbitMQServer,
    RedisCluster,
    RedisSentinelTrio,
    RedisServer,
    require,
)

GIVEN_MONGODB = os.environ.get("MACHINERY_TEST_MONGODB_URL", "")

#: Each kind of broker, and the fixture with its URL.
BROKERS = {
    "redis": "redis_url",
    "mongodb": "mongodb_url",
    "amqp": "amqp_url",
    "postgresql": "postgres_url",
}

OpenServer = Callable[[], Server]

_databases = itertools.count()


def url_of(kind: str, file: Path | str, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty store: in memory, a SQLite file, or a part of a shared server."""
    match kind:
        case "memory":
            return f"memory://{next(_databases)}"
        case "sqlite":
            return f"sqlite:///{file}"
        case "amqp" | "mongodb":
            return str(request.getfixturevalue(f"{kind}_url"))
        case "postgresql":
            return str(request.getfixturevalue("postgres_url"))
    return str(request.getfixturevalue(f"empty_{kind}").url)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    require(RedisServer)
    with RedisServer() as server:
        yield server


@pytest.fixture
def empty_redis(redis_server: RedisServer) -> RedisServer:
    """The shared Redis, running and without a key; a test that stopped it harms nobody after it."""
    redis_server.start()
    redis_server.thaw()
    redis_server.cli("FLUSHALL")
    redis_server.cli("SCRIPT", "FLUSH")
    return redis_server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """A database of the shared Redis, running, with nothing in it."""
    redis_server.start()
    redis_server.thaw()
    number = next(_databases) % 16
    redis_server.cli(
        "EVAL", "redis.call('SELECT', ARGV[1]) return redis.call('FLUSHDB')", 0, number
    )
    return f"{redis_server.url.rpartition('/')[0]}/{number}"


@pytest.fixture(scope="session")
def redis_sentinels() -> Iterator[RedisSentinelTrio]:
    require(RedisSentinelTrio)
    with RedisSentinelTrio() as trio:
        yield trio


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    require(RedisCluster)
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def empty_cluster(redis_cluster: RedisCluster) -> RedisCluster:
    """The shared cluster, complete and without a key."""
    redis_cluster.start()
    for node in redis_cluster.masters:
        wait_until(lambda: node.cli("FLUSHALL") == "OK")  # noqa: B023
        node.cli("SCRIPT", "FLUSH")
    return redis_cluster


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitMQServer]:
    require(RabbitMQServer)
    with RabbitMQServer() as server:
        yield server


@pytest.fixture(scope="session")
def memcached_server() -> Iterator[MemcachedServer]:
    require(MemcachedServer)
    with MemcachedServer() as server:
        yield server


@pytest.fixture
def empty_memcached(memcached_server: MemcachedServer) -> MemcachedServer:
    """The shared memcached, running and without a key."""
    memcached_server.start()
    memcached_server.thaw()
    memcached_server.flush()
    return memcached_server


class Vhosts:
    """Hands out unused vhosts, and makes many at a time, since asking takes half a second.

    Those given back are deleted when the next are made: RabbitMQ looks at the queues of all vhosts
    when it starts one, so that each would take longer than the one before.
    """

    BATCH = 40

    def __init__(self, server: RabbitMQServer) -> None:
        self._server = server
        self._made = 0
        self._given = 0
        self._over: list[str] = []

    def __call__(self) -> str:
        """Return the URL of a new one."""
        if self._given == self._made:
            names = ", ".join(f'<<"{name}">>' for name in self._over)
            self._server.ctl(
                "eval",
                _RENEWED.format(over=names, first=self._made, last=self._made + self.BATCH - 1),
            )
            self._over.clear()
            self._made += self.BATCH
        self._given += 1
        return f"{self._server.url}t{self._given - 1}"

    def give_back(self, url: str) -> None:
        """Take one that no connection will be opened to again."""
        self._over.append(url.rpartition("/")[2])


_RENEWED = """[rabbit_vhost:delete(N, <<"test">>) || N <- [{over}]],
[begin N = list_to_binary("t" ++ integer_to_list(I)), rabbit_vhost:add(N, <<"test">>),
    rabbit_auth_backend_internal:set_permissions(
        <<"guest">>, N, <<".*">>, <<".*">>, <<".*">>, <<"test">>)
    end || I <- lists:seq({first}, {last})]."""


@pytest.fixture(scope="session")
def vhosts(rabbitmq_server: RabbitMQServer) -> Vhosts:
    return Vhosts(rabbitmq_server)


@pytest.fixture
def amqp_url(vhosts: Vhosts) -> Iterator[str]:
    """A vhost of the shared RabbitMQ with nothing in it."""
    url = vhosts()
    yield url
    vhosts.give_back(url)


@pytest.fixture(scope="session")
def mongodb_server() -> Iterator[str]:
    """The URL of the MongoDB for the run: the one that is given, mongod, or a stand-in."""
    if GIVEN_MONGODB:
        yield GIVEN_MONGODB
        return
    kind = private_mongo.KINDS[private_mongo.best_kind()]
    require(kind)
    with kind() as server:
        yield server.url


@pytest.fixture
def mongodb_url(mongodb_server: str) -> Iterator[str]:
    """A database of the shared MongoDB with nothing in it; dropped after the test."""
    from pymongo import MongoClient

    name = f"machinery_test_{os.getpid()}_{next(_databases)}"
    place, _, query = mongodb_server.partition("?")
    yield f"{place.rstrip('/')}/{name}" + (f"?{query}" if query else "")
    with MongoClient[Any](mongodb_server, serverSelectionTimeoutMS=5000) as client:
        client.drop_database(name)


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQLServer]:
    require(PostgreSQLServer)
    with PostgreSQLServer() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql_server: PostgreSQLServer) -> str:
    """A database of the shared PostgreSQL with nothing in it, as SQLAlchemy's URL."""
    url = postgresql_server.new_database(f"t{next(_databases)}")
    return url.replace("://", "+psycopg://")


@pytest.fixture
def postgres_url(postgresql_server: PostgreSQLServer) -> str:
    """The database of the shared PostgreSQL that our stores use, running, with nothing in it."""
    postgresql_server.start()
    postgresql_server.thaw()
    wait_until(postgresql_server.empty, HANG)
    return postgresql_server.url


@pytest.fixture
def open_proxy() -> Iterator[Callable[[int], Proxy]]:
    """Opens a proxy to a port; closed after the test."""
    with ExitStack() as proxies:
        yield lambda port: proxies.enter_context(Proxy(port))


@pytest.fixture(params=["memory", "sqlite", *BROKERS])
def broker_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a broker of each kind, with nothing in it."""
    match request.param:
        case "memory" | "sqlite":
            return url_of(request.param, f"{tmp_path}/store.db?synchronous=normal", request)
        case other:
            return str(request.getfixturevalue(BROKERS[other]))


@pytest.fixture
def open_server(broker_url: str) -> Iterator[OpenServer]:
    """Opens a Server with connections of its own, as another process would; closed after it."""
    results = f"memory://results-{next(_databases)}"
    with ExitStack() as servers:

        def open_one() -> Server:
            server = Server(Config(broker=broker_url, result_backend=results))
            servers.callback(server.close)
            return server

        yield open_one
