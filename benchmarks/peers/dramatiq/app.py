# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Dramatiq: always acknowledges after the run; has the middleware for retries and results only.

On RabbitMQ a message is confirmed before `send` returns, as ours is.
"""

from __future__ import annotations

import dramatiq
from dramatiq.middleware import Retries
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks.peers.driving import AMQP, URL

backend = RedisBackend(url=f"{URL}/1")
middleware = [Retries(), Results(backend=backend)]
if AMQP:
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    broker = RabbitmqBroker(url=AMQP, confirm_delivery=True, middleware=middleware)
else:
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=f"{URL}/0", middleware=middleware)
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def noop(number):
    return number
