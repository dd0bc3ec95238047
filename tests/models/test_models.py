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


def test_broker_scripts_equal_their_models(empty_redis: RedisServer) -> None:
    run_machine(BrokerMachine, empty_redis, examples=60, steps=40)


def test_backend_scripts_equal_their_models(empty_redis: RedisServer) -> None:
    run_machine(BackendMachine, empty_redis, examples=60, steps=30)


def test_settlement_scripts_equal_their_models(empty_redis: RedisServer) -> None:
    run_machine(SettlementMachine, empty_redis, examples=60, steps=30)


def test_lock_scripts_equal_their_models(empty_redis: RedisServer) -> None:
    run_machine(LockMachine, empty_redis, examples=20, steps=20)


def test_schedule_and_claim_scripts_equal_their_models(
    empty_redis: RedisServer,
) -> None:
    run_machine(AmendMachine, empty_redis, examples=30, steps=20)


def test_cluster_backend_scripts_equal_their_models(
    redis_node: RedisServer,
) -> None:
    run_machine(ClusterBackendMachine, redis_node, examples=40, steps=20)


def test_cluster_claim_scripts_equal_their_models(redis_node: RedisServer) -> None:
    run_machine(ClusterClaimMachine, redis_node, examples=25, steps=20)


def test_cluster_listing_scripts_equal_their_models(
    redis_node: RedisServer,
) -> None:
    run_machine(ClusterListsMachine, redis_node, examples=15, steps=20)


def test_cluster_queue_scripts_equal_their_models(redis_node: RedisServer) -> None:
    run_machine(ClusterQueueMachine, redis_node, examples=25, steps=25)


def test_cluster_lock_scripts_equal_their_models(redis_node: RedisServer) -> None:
    run_machine(ClusterLockMachine, redis_node, examples=10, steps=20)
