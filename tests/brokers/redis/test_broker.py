"""The Redis broker where a moment lies between two of its steps."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from machinery_py.brokers.base import Message
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.scripts import Script
from machinery_py.tasks.signature import Signature
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import encode_signature
from tests.stores.redis.case import Drivers, clock, open_driver

__all__ = ["clock", "open_driver"]


def test_stats_count_a_message_that_comes_due_meanwhile(
    open_driver: Drivers, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, other = RedisBroker(open_driver()), RedisBroker(open_driver())
    later = clock.now() + dt.timedelta(seconds=10)
    body = encode_signature(Signature(name="n", uuid="t", routing_key="mail"))
    broker.put([Message(uuid="t", name="n", queue="mail", body=body, eta=later)], token="")
    run = broker.driver.run

    def run_and_move(script: Script, *values: object, **options: Any) -> Any:
        reply = run(script, *values, **options)
        if script is scripts.STATS:
            clock.advance(11)
            other.move_due()
        return reply

    monkeypatch.setattr(broker.driver, "run", run_and_move)
    counted = broker.stats()
    moved = broker.stats()

    assert [(one.waiting, one.delayed) for one in moved] == [(1, 0)]
    assert sum(one.waiting + one.delayed for one in counted) == 1
