"""The contract of locks, over Redis: the tests of test_locks.py."""

from __future__ import annotations

import pytest

from machinery_py.locks import Lock
from machinery_py.locks.redis import RedisLock
from tests.stores import test_locks
from tests.stores.redis_case import Drivers, clock, open_driver, redis_server, redis_url
from tests.stores.test_locks import OpenLock, lock

__all__ = ["clock", "lock", "open_driver", "redis_server", "redis_url"]

for _name, _test in vars(test_locks).items():
    if _name.startswith("test_") and _name != "test_of_several_processes_one_wins":
        globals()[_name] = _test


@pytest.fixture
def open_lock(open_driver: Drivers) -> OpenLock:
    def open_redis() -> Lock:
        return RedisLock(open_driver())

    return open_redis
