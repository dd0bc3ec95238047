"""Unique and exclusive tasks over pairs of stores, with real workers in threads.

`make chaos` (MACHINERY_TEST_FULL=1) runs all of it on pairs and slower stores; otherwise only what
depends on how a key is kept.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.exclusive import ExclusiveConformance
from machinery_py.testing.conformance.unique import UniqueConformance
from tests.support.servers import RedisCluster

_numbers = itertools.count(1)


class Unique(UniqueConformance, ExclusiveConformance):
    pass


def memory() -> str:
    # A name, so that a second Server finds the same store.
    return f"memory://unique-{next(_numbers)}"


FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))

#: What is decided before a store is asked, or by the lock alone.
ELSEWHERE = [
    "test_equal_calls_are_recognised_however_written",
    "test_caller_can_give_the_key",
    "test_single_call_can_be_unique_by_option",
    "test_duplicate_raises_when_rejected",
    "test_unique_steps_of_a_workflow_are_always_sent",
    "test_fifty_calls_on_three_workers_run_one_at_a_time",
    "test_waiting_exclusive_calls_run_in_the_order_of_their_sending",
    "test_exclusive_calls_with_other_arguments_run_together",
    "test_exclusive_call_that_may_not_wait_is_skipped",
    "test_waiting_exclusive_call_fails_after_its_timeout",
    "test_lock_is_free_however_a_run_ends",
    "test_exclusive_coroutines_run_one_at_a_time",
]


def short(suite: type) -> type:
    """The suite, less that; all of it with MACHINERY_TEST_FULL."""
    return (
        suite
        if FULL
        else type(
            suite.__name__, (suite,), {name: None for name in ELSEWHERE if hasattr(suite, name)}
        )
    )


class TestMemory(Unique):
    @pytest.fixture
    def server(self) -> Server:
        return Server(Config(broker=memory()))


class TestSQLite(Unique):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(Config(broker=f"sqlite:///{tmp_path}/store.db?synchronous=normal"))


class TestPostgreSQL(Unique):
    @pytest.fixture
    def server(self, postgres_url: str) -> Server:
        return Server(Config(broker=postgres_url))


class TestRedis(Unique):
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url))


class TestRedisBrokerAndMemoryBackend(short(Unique)):  # type: ignore[misc]
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=redis_url, result_backend=memory()))


class TestMemoryBrokerAndRedisBackend(short(Unique)):  # type: ignore[misc]
    @pytest.fixture
    def server(self, redis_url: str) -> Server:
        return Server(Config(broker=memory(), result_backend=redis_url))


class TestMongo(short(Unique)):  # type: ignore[misc]
    @pytest.fixture
    def server(self, mongodb_url: str) -> Server:
        return Server(Config(broker=mongodb_url))


class TestRedisCluster(short(Unique)):  # type: ignore[misc]
    @pytest.fixture
    def server(self, empty_cluster: RedisCluster) -> Server:
        return Server(Config(broker=empty_cluster.url))


if FULL:

    class TestMemoryBrokerAndMongoBackend(UniqueConformance):
        @pytest.fixture
        def server(self, mongodb_url: str) -> Server:
            return Server(Config(broker=memory(), result_backend=mongodb_url))

    class TestMemoryBrokerAndClusterBackend(UniqueConformance):
        @pytest.fixture
        def server(self, empty_cluster: RedisCluster) -> Server:
            return Server(Config(broker=memory(), result_backend=empty_cluster.url))
