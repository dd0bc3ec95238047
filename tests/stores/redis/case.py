"""A private server, and a clock that moves the server's time, for tests of the Redis stores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from machinery_py.connections.redis.client import RedisDriver
from machinery_py.testing.clocks import ManualClock

# Every key that has an expiry gets that much older. In: milliseconds.
AGE = """
local cursor = '0'
repeat
  local step = redis.call('SCAN', cursor, 'COUNT', 1000)
  cursor = step[1]
  for _, key in ipairs(step[2]) do
    local left = redis.call('PTTL', key)
    if left > 0 then
      if left <= tonumber(ARGV[1]) then
        redis.call('DEL', key)
      else
        redis.call('PEXPIRE', key, left - ARGV[1])
      end
    end
  end
until cursor == '0'
"""

_databases = itertools.cycle(range(16))


class ServerClock(ManualClock):
    """Tells the stores the time, and lets what they gave an expiry grow older."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._driver = RedisDriver(url)

    def advance(self, seconds: float = 0.0, **more: float) -> None:
        before = self.now()
        super().advance(seconds, **more)
        passed = (self.now() - before).total_seconds()
        self._driver.ask(b"EVAL", AGE.encode(), b"0", b"%d" % round(passed * 1000), doing="ageing")

    def close(self) -> None:
        self._driver.close()


class Drivers:
    """Each call opens connections of its own, as another process would."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.url = url
        self._clock = clock
        self._open: list[RedisDriver] = []

    def __call__(self) -> RedisDriver:
        driver = RedisDriver(self.url, clock=self._clock)
        self._open.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._open:
            driver.close()


@pytest.fixture
def clock(redis_url: str) -> Iterator[ServerClock]:
    clock = ServerClock(redis_url)
    yield clock
    clock.close()


@pytest.fixture
def open_driver(redis_url: str, clock: ServerClock) -> Iterator[Drivers]:
    drivers = Drivers(redis_url, clock)
    yield drivers
    drivers.close()
