"""What the tests of the MongoDB stores share: a private server, and a database for each test."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import pytest

from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.testing.clocks import ManualClock
from tests.support import private_mongo
from tests.support.fixtures import mongodb_server
from tests.support.servers import require

__all__ = ["mongodb_server"]

_databases = itertools.count()


class Drivers:
    """Each call opens connections of its own, as another process would."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.url = url
        self._clock = clock
        self._open: list[MongoDriver] = []

    def __call__(self) -> MongoDriver:
        driver = MongoDriver(self.url, clock=self._clock)
        self._open.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._open:
            driver.close()


@pytest.fixture
def mongodb_url(mongodb_server: str) -> Iterator[str]:
    """A database with nothing in it; dropped after the test."""
    from pymongo import MongoClient
    from pymongo.uri_parser import parse_uri

    name = f"machinery_test_{os.getpid()}_{next(_databases)}"
    place, _, query = mongodb_server.partition("?")
    parse_uri(mongodb_server)
    yield f"{place.rstrip('/')}/{name}" + (f"?{query}" if query else "")
    with MongoClient(mongodb_server, serverSelectionTimeoutMS=5000) as client:
        client.drop_database(name)


def own_mongodb(request: pytest.FixtureRequest) -> str:
    """The URL of a server for this fixture alone: `mongodb_url` has parameters, and cannot be asked for by its name."""
    kind = private_mongo.KINDS[private_mongo.best_kind()]
    require(kind)
    stack = contextlib.ExitStack()
    request.addfinalizer(stack.close)
    return stack.enter_context(kind()).url + "machinery_test"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_driver(mongodb_url: str, clock: ManualClock) -> Iterator[Drivers]:
    drivers = Drivers(mongodb_url, clock)
    yield drivers
    drivers.close()
