# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Dramatiq: always acknowledges after the run; of its middleware only what retries and stores results."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks.peers.driving import URL

backend = RedisBackend(url=f"{URL}/1")
broker = RedisBroker(url=f"{URL}/0", middleware=[Retries(), Results(backend=backend)])
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def noop(number):
    return number
