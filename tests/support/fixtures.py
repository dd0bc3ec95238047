"""Fixtures: one private server of each kind for the whole run, and proxies. A missing program skips, or fails with CI set.

A test that kills a server takes one of its own (`with RedisServer() as redis`), or starts the shared one again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from machinery_py.testing.waiting import HANG, wait_until
from tests.support import private_mongo
from tests.support.private import free_port
from tests.support.private_redis import BUS, SLOTS
from tests.support.proxy import Proxy
from tests.support.servers import (
    MemcachedServer,
    RabbitMQServer,
    RedisCluster,
    RedisSentinelTrio,
    RedisServer,
    require,
)


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


@pytest.fixture(scope="session")
def redis_node() -> Iterator[RedisServer]:
    """A Redis Cluster of one node, which has all slots."""
    require(RedisServer)
    with RedisServer(
        port=free_port(besides=BUS),
        config={"cluster-enabled": "yes", "cluster-node-timeout": "1000"},
    ) as node:
        node.cli("CLUSTER", "ADDSLOTS", *range(SLOTS))
        wait_until(
            lambda: "cluster_state:ok" in str(node.cli("CLUSTER", "INFO")),
            HANG,
            "a node that serves all slots",
        )
        yield node


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


GIVEN_MONGODB = os.environ.get("MACHINERY_TEST_MONGODB_URL", "")


@pytest.fixture(
    scope="session", params=["given-mongodb" if GIVEN_MONGODB else private_mongo.best_kind()]
)
def mongodb_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the MongoDB for the run, which test ids name: the one that is given, mongod, or a stand-in."""
    if GIVEN_MONGODB:
        yield GIVEN_MONGODB
        return
    kind = private_mongo.KINDS[request.param]
    require(kind)
    with kind() as server:
        yield server.url


@pytest.fixture
def open_proxy() -> Iterator[Callable[[int], Proxy]]:
    """Opens a proxy to a port; closed after the test."""
    with ExitStack() as proxies:
        yield lambda port: proxies.enter_context(Proxy(port))
