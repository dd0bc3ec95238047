"""The contract of locks, over a Redis Cluster: the tests of test_locks.py."""

from __future__ import annotations

import pytest

from machinery_py.locks import Lock
from machinery_py.locks.redis_cluster import ClusterLock
from tests.stores import test_locks
from tests.stores.redis_cluster_case import Clusters, clock, empty_cluster, open_cluster
from tests.stores.test_locks import OpenLock, lock

__all__ = ["clock", "empty_cluster", "lock", "open_cluster"]

for _name, _test in vars(test_locks).items():
    if _name.startswith("test_") and _name != "test_of_several_processes_one_wins":
        globals()[_name] = _test


@pytest.fixture
def open_lock(open_cluster: Clusters) -> OpenLock:
    def open_in_cluster() -> Lock:
        return ClusterLock(open_cluster())

    return open_in_cluster
