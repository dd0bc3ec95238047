"""The contract of locks, over MongoDB: the tests of test_locks.py."""

from __future__ import annotations

import pytest

from machinery_py.locks import Lock
from machinery_py.locks.mongo import MongoLock
from tests.stores import test_locks
from tests.stores.mongo_case import Drivers, clock, mongodb_server, mongodb_url, open_driver
from tests.stores.test_locks import OpenLock, lock

__all__ = ["clock", "lock", "mongodb_server", "mongodb_url", "open_driver"]

for _name, _test in vars(test_locks).items():
    if _name.startswith("test_") and _name != "test_of_several_processes_one_wins":
        globals()[_name] = _test


@pytest.fixture
def open_lock(open_driver: Drivers) -> OpenLock:
    def open_mongo() -> Lock:
        return MongoLock(open_driver())

    return open_mongo
