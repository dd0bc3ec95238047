"""Settlement in a Redis Cluster: the message is in the slot of its queue, the state in the slot of its task.

The steps are those of outbox.py. A message of an outbox is put with a name of its own, in the queue's slot: whoever publishes
the outbox again puts nothing twice. docs/explanation/redis-cluster.md has the crash points.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from machinery_py.backends.redis.cluster import ClusterBackend
from machinery_py.brokers.base import Message
from machinery_py.brokers.redis.cluster import ClusterBroker
from machinery_py.clock import Clock
from machinery_py.stores.outbox import TwoStores

_pack = msgspec.json.Encoder().encode


class ClusterStore(TwoStores):
    """A broker and a backend in one cluster."""

    def __init__(self, broker: ClusterBroker, backend: ClusterBackend, clock: Clock) -> None:
        super().__init__(broker, backend, clock)
        self._messages = broker

    def put(self, messages: Sequence[Message]) -> None:
        self._messages.put_once(
            [(f"out {hashlib.sha1(_pack(message)).hexdigest()}", message) for message in messages]
        )
