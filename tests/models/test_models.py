"""Every script for Redis does what its model says, on any arguments, in any order."""

from __future__ import annotations

import pytest

from tests.models.amend_rules import AmendMachine
from tests.models.backend_rules import BackendMachine, SettlementMachine
from tests.models.broker_rules import BrokerMachine
from tests.models.cluster_rules import (
    ClusterBackendMachine,
    ClusterClaimMachine,
    ClusterListsMachine,
    ClusterLockMachine,
    ClusterQueueMachine,
)
from tests.models.lock_rules import LockMachine
from tests.models.machine import EXAMPLES, run_machine
from tests.support.servers import RedisServer

pytestmark = pytest.mark.timeout(
    3600 if EXAMPLES else 900
)  # finding the shortest failure takes minutes


def test_the_scripts_of_the_broker_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(BrokerMachine, empty_redis, examples=60, steps=40)


def test_the_scripts_of_the_backend_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(BackendMachine, empty_redis, examples=60, steps=30)


def test_the_scripts_of_settlement_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(SettlementMachine, empty_redis, examples=60, steps=30)


def test_the_scripts_of_locks_do_what_their_models_say(empty_redis: RedisServer) -> None:
    run_machine(LockMachine, empty_redis, examples=20, steps=20)


def test_the_scripts_of_schedules_and_claims_do_what_their_models_say(
    empty_redis: RedisServer,
) -> None:
    run_machine(AmendMachine, empty_redis, examples=30, steps=20)


def test_the_scripts_of_a_clusters_backend_do_what_their_models_say(
    redis_node: RedisServer,
) -> None:
    run_machine(ClusterBackendMachine, redis_node, examples=40, steps=20)


def test_the_scripts_of_a_clusters_claims_do_what_their_models_say(redis_node: RedisServer) -> None:
    run_machine(ClusterClaimMachine, redis_node, examples=25, steps=20)


def test_the_scripts_of_a_clusters_listings_do_what_their_models_say(
    redis_node: RedisServer,
) -> None:
    run_machine(ClusterListsMachine, redis_node, examples=15, steps=20)


def test_the_scripts_of_a_clusters_queues_do_what_their_models_say(redis_node: RedisServer) -> None:
    run_machine(ClusterQueueMachine, redis_node, examples=25, steps=25)


def test_the_scripts_of_a_clusters_locks_do_what_their_models_say(redis_node: RedisServer) -> None:
    run_machine(ClusterLockMachine, redis_node, examples=10, steps=20)
