"""Every script for Redis does what its model says, on any arguments, in any order."""

from __future__ import annotations

import pytest

from tests.models.backend_rules import BackendMachine, SettlementMachine
from tests.models.broker_rules import BrokerMachine
from tests.models.machine import EXAMPLES, run_machine
from tests.support.servers import RedisServer

pytestmark = pytest.mark.timeout(
    3600 if EXAMPLES else 900
)  # finding the shortest failure takes minutes


def test_broker_scripts_equal_their_models(empty_redis: RedisServer) -> None:
    run_machine(BrokerMachine, empty_redis, examples=60, steps=40)


def test_backend_scripts_equal_their_models(empty_redis: RedisServer) -> None:
    run_machine(BackendMachine, empty_redis, examples=60, steps=30)


def test_settlement_scripts_equal_their_models(empty_redis: RedisServer) -> None:
    run_machine(SettlementMachine, empty_redis, examples=60, steps=30)
