"""The contracts over the master that sentinels name.

Once connected, all is as on one Redis; `make chaos` and `make matrix` also run the contracts of
broker and backend.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores.pair_case import ALL_PAIRS
from tests.stores.redis import test_conformance as standalone
from tests.stores.redis.case import clock, open_driver
from tests.support.servers import RedisSentinelTrio, require

__all__ = ["clock", "open_driver"]


@pytest.fixture(scope="module")
def trio() -> Iterator[RedisSentinelTrio]:
    require(RedisSentinelTrio)
    # No test here wants a failover; on a busy machine a server may be silent for a second.
    with RedisSentinelTrio(down_after=30.0) as trio:
        yield trio


@pytest.fixture
def redis_url(trio: RedisSentinelTrio) -> str:
    """The master with nothing in it."""
    trio.current_master().cli("FLUSHALL")
    return (
        "redis://"
        + ",".join(f"{host}:{port}" for host, port in trio.addresses)
        + f"/0?master_name={trio.name}"
    )


class TestSentinelBroker(standalone.TestRedisBroker):
    __test__ = ALL_PAIRS


class TestSentinelBackend(standalone.TestRedisBackend):
    __test__ = ALL_PAIRS


class TestSentinelStore(standalone.TestRedisStore): ...
