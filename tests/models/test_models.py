"""Every script for Redis does what its model says, on any arguments, in any order."""

from __future__ import annotations

import pytest

from machinery_py.testing.servers import RedisServer
from tests.models.backend_rules import BackendMachine, SettlementMachine
from tests.models.broker_rules import BrokerMachine
from tests.models.lock_rules import LockMachine
from tests.models.machine import EXAMPLES, run_machine

pytestmark = pytest.mark.timeout(3600 if EXAMPLES else 900)  # finding the shortest failure takes minutes


def test_the_scripts_of_the_broker_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(BrokerMachine, empty_redis, examples=60, steps=40)


def test_the_scripts_of_the_backend_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(BackendMachine, empty_redis, examples=60, steps=30)


def test_the_scripts_of_settlement_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(SettlementMachine, empty_redis, examples=60, steps=30)


def test_the_scripts_of_locks_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(LockMachine, empty_redis, examples=20, steps=20)
