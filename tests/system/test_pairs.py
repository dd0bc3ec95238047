"""Whole applications over every broker beside every result backend; what docs/reference/matrix.md shows.

Pairs that have a suite of their own elsewhere are run there. `make matrix` (MACHINERY_TEST_PAIRS=1) and `make chaos`
(MACHINERY_TEST_FULL=1) run all others; otherwise the workflows are run over one, so that this file is never stale.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from machinery_py import Config, Server
from machinery_py.config.sections import AMQPConfig
from machinery_py.testing.conformance.workflows import LinkedConformance, WorkflowConformance
from tests.backends.memcached.case import empty_memcached
from tests.matrix import stores
from tests.stores.mongodb.case import mongodb_server, mongodb_url
from tests.stores.pair_case import ALL_PAIRS, Place, place
from tests.stores.rabbitmq.case import amqp_url, vhosts

__all__ = ["amqp_url", "empty_memcached", "mongodb_server", "mongodb_url", "vhosts"]

ELSEWHERE = frozenset(
    {
        ("memory", "memory"),
        ("sqlite", "sqlite"),
        ("redis", "redis"),
        ("mongodb", "mongodb"),
        ("memory", "sqlite"),
        ("sqlite", "memory"),
        ("redis", "memory"),
        ("mongodb", "redis"),
        ("redis", "mongodb"),
        ("memory", "memcache"),
        ("sqlite", "memcache"),
        ("redis", "memcache"),
        ("amqp", "redis"),
    }
)
ALWAYS = ("sqlite", "mongodb")
if TYPE_CHECKING:
    Whole = WorkflowConformance
else:
    Whole = WorkflowConformance if ALL_PAIRS else LinkedConformance


class Pair(Whole):
    LONG = 60
    __test__ = False

    @pytest.fixture
    def server(
        self, broker_place: Place, backend_place: Place, request: pytest.FixtureRequest
    ) -> Server:
        amqp = AMQPConfig(
            queue_declare_args={"x-max-priority": 10} if "priorit" in request.node.name else {}
        )
        return Server(Config(broker=broker_place.url, result_backend=backend_place.url, amqp=amqp))


for _broker, _backend in itertools.product(*stores()):
    if (_broker, _backend) not in ELSEWHERE and (ALL_PAIRS or (_broker, _backend) == ALWAYS):
        _name = f"Test{_broker.capitalize()}BrokerAnd{_backend.capitalize()}Backend"
        globals()[_name] = type(
            _name,
            (Pair,),
            {
                "__test__": True,
                "broker_place": place(_broker, "broker"),
                "backend_place": place(_backend, "backend"),
            },
        )
