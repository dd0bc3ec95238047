"""The workflows over every broker beside every result backend; what docs/reference/matrix.md shows.

Pairs that have a suite of their own elsewhere are run there. `make matrix` (MACHINERY_TEST_PAIRS=1) and `make chaos`
(MACHINERY_TEST_FULL=1) run the others; otherwise one pair is, so that this file is never stale.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.config_sections import AMQPConfig
from machinery_py.testing.conformance.workflows import LinkedConformance
from tests.matrix import stores
from tests.stores.amqp_case import amqp_url, vhosts
from tests.stores.memcache_case import empty_memcached
from tests.stores.mongo_case import mongodb_server, mongodb_url

__all__ = ["amqp_url", "empty_memcached", "mongodb_server", "mongodb_url", "vhosts"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL") or os.environ.get("MACHINERY_TEST_PAIRS"))
ELSEWHERE = frozenset({
    ("memory", "memory"), ("sqlite", "sqlite"), ("redis", "redis"), ("mongodb", "mongodb"),
    ("memory", "sqlite"), ("sqlite", "memory"), ("redis", "memory"), ("mongodb", "redis"), ("redis", "mongodb"),
    ("memory", "memcache"), ("sqlite", "memcache"), ("redis", "memcache"),
    ("amqp", "memory"), ("amqp", "sqlite"), ("amqp", "redis"), ("amqp", "memcache"),
})
ALWAYS = ("sqlite", "mongodb")
_numbers = itertools.count(1)


class Pair(LinkedConformance):
    LONG = 60
    __test__ = False

    # Its callback is published twice, with one UUID, if the duplicate comes before the first outbox is cleared: at least once.
    test_a_message_that_comes_twice_counts_once = None

    @pytest.fixture
    def server(self, broker_url: str, backend_url: str, request: pytest.FixtureRequest) -> Server:
        amqp = AMQPConfig(queue_declare_args={"x-max-priority": 10} if "priorit" in request.node.name else {})
        return Server(Config(broker=broker_url, result_backend=backend_url, amqp=amqp))


def _place(kind: str, role: str) -> object:
    """A fixture that gives the URL of an empty store. What it asks for it names, since a server may have parameters."""
    if kind == "memory":
        def url(self: object) -> str:
            return f"memory://pair-{role}-{next(_numbers)}"
    elif kind == "sqlite":
        def url(self: object, tmp_path: Path) -> str:  # type: ignore[misc]
            return f"sqlite:///{tmp_path}/{role}.db?synchronous=normal"
    elif kind == "redis":
        def url(self: object, empty_redis: object) -> str:  # type: ignore[misc]
            return str(empty_redis.url)  # type: ignore[attr-defined]
    elif kind == "mongodb":
        def url(self: object, mongodb_url: str) -> str:  # type: ignore[misc]
            return mongodb_url
    elif kind == "amqp":
        def url(self: object, amqp_url: str) -> str:  # type: ignore[misc]
            return amqp_url
    elif kind == "memcache":
        def url(self: object, empty_memcached: object) -> str:  # type: ignore[misc]
            return str(empty_memcached.url)  # type: ignore[attr-defined]
    else:
        raise AssertionError(f"{kind}: how is an empty one opened?")
    return pytest.fixture(name=f"{role}_url")(url)


_brokers, _backends = stores()
for _broker, _backend in itertools.product(_brokers, _backends):
    if (_broker, _backend) not in ELSEWHERE and (FULL or (_broker, _backend) == ALWAYS):
        _name = f"Test{_broker.capitalize()}BrokerAnd{_backend.capitalize()}Backend"
        globals()[_name] = type(_name, (Pair,), {
            "__test__": True, "broker_url": _place(_broker, "broker"), "backend_url": _place(_backend, "backend"),
        })
