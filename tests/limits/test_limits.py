"""The contract of limits, over memory, SQLite and Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.limits import Limits
from machinery_py.limits.redis import RedisLimits
from machinery_py.limits.rows import RowsLimits
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from tests.stores.redis.case import Drivers, ServerClock, clock, open_driver

__all__ = ["clock", "open_driver"]


class TestMemoryLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, clock: ManualClock) -> OpenLimits:
        limits = RowsLimits(MemoryRows(clock))
        return lambda: limits


class TestSQLiteLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, clock: ManualClock, tmp_path: Path) -> Iterator[OpenLimits]:
        drivers: list[SQLiteDriver] = []

        def open_sqlite() -> Limits:
            drivers.append(
                SQLiteDriver(tmp_path / "machinery.db", clock=clock, synchronous="NORMAL")
            )
            return RowsLimits(SQLiteRows(drivers[-1]))

        yield open_sqlite
        for driver in drivers:
            driver.close()


class TestRedisLimits(LimitsConformance):
    @pytest.fixture
    def clock(self, redis_url: str) -> Iterator[ServerClock]:
        with closing(ServerClock(redis_url)) as clock:
            yield clock

    @pytest.fixture
    def open_limits(self, open_driver: Drivers) -> OpenLimits:
        return lambda: RedisLimits(open_driver())
