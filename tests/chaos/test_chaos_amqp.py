"""A minute of chaos over RabbitMQ with results in Redis, in `make chaos`.

The short version is in tests/system/test_kills.py.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.chaos.test_chaos import HANG, RANDOM, chaos
from tests.support.servers import RabbitMQServer, RedisServer, require


@pytest.mark.chaos
@pytest.mark.timeout(2 * HANG)
def test_rabbitmq_loses_and_doubles_nothing_under_kills(
    tmp_path: pathlib.Path,
) -> None:
    require(RabbitMQServer)
    require(RedisServer)

    verdict = chaos("amqp+redis", RANDOM, tmp_path / "run", tasks=700)

    assert verdict.word == "PASSED", verdict.page(f"seed {RANDOM}")
    assert "kill" in str(verdict.figures["faults"])
