"""Every script for Redis does what its model says, on any arguments, in any order."""

from __future__ import annotations

from machinery_py.testing.servers import RedisServer
from tests.models.backend_rules import BackendMachine, SettlementMachine
from tests.models.broker_rules import BrokerMachine
from tests.models.machine import run_machine


def test_the_scripts_of_the_broker_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(BrokerMachine, empty_redis, examples=60, steps=40)


def test_the_scripts_of_the_backend_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(BackendMachine, empty_redis, examples=60, steps=30)


def test_the_scripts_of_settlement_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(SettlementMachine, empty_redis, examples=60, steps=30)
