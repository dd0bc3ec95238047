"""What the tests of the MongoDB stores share: a private server, and a database for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.testing.clocks import ManualClock

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
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_driver(mongodb_url: str, clock: ManualClock) -> Iterator[Drivers]:
    drivers = Drivers(mongodb_url, clock)
    yield drivers
    drivers.close()
