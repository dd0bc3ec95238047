"""The contract of a family: the stores behind one URL, sharing their connections."""

from __future__ import annotations

from abc import ABC

import msgspec

from machinery_py.backends.base import Backend
from machinery_py.brokers.base import Broker
from machinery_py.clock import Clock
from machinery_py.config.sections import AMQPConfig, MongoDBConfig, RedisConfig
from machinery_py.config.urls import redact
from machinery_py.errors import Unsupported
from machinery_py.locks.base import Lock
from machinery_py.stores.base import Store


class FamilyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a family needs, and the clock. Lengths are in seconds."""

    clock: Clock
    lease: float = 10.0
    expire_in: float = 3600.0
    timeout: float = 5.0
    separator: str = ""  # between several URLs
    strategy: str = "round-robin"  # in `failover.STRATEGIES`
    strict_durability: bool = False
    redis: RedisConfig = RedisConfig()
    amqp: AMQPConfig = AMQPConfig()
    default_queue: str = "machinery_tasks"
    mongodb: MongoDBConfig = MongoDBConfig()


class Family(ABC):  # noqa: B024 - a family need not be able to do all of it
    """Opens what it is asked for, lazily; `close` gives back what all of it shares."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        self.url = url
        self.options = options

    def broker(self) -> Broker:
        raise Unsupported(f"{redact(self.url)} is no broker")

    def backend(self) -> Backend:
        raise Unsupported(f"{redact(self.url)} is no result backend")

    def lock(self) -> Lock:
        raise Unsupported(f"{redact(self.url)} gives no locks")

    def together(self) -> Store | None:
        """Broker and backend that settle as one, if they can."""
        return None

    def close(self) -> None:  # noqa: B027 - some share nothing
        """Give everything back. May be called twice."""
