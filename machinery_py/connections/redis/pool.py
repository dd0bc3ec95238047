"""Limits of a driver's connections, from the section `redis` of the configuration.

A driver counts all connections that it opens: those for commands, one for each consumer and one for
each thread that waits for results.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from machinery_py.connections.redis.keys import DELAYED

L = TypeVar("L")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Limits of a driver. Lengths are in seconds, and infinite where there is no limit.

    Attributes:
        max_idle: unused connections that are kept, each for `idle_timeout` at most.
        max_active: connections at most; 0 is any number. At that many, `wait`, or fail.
        read, write: for a reply, and until a command is sent.
        block: a consumer looks at its queues at least that often.
        delayed_key: Go's set of delayed messages.
    """

    max_idle: int = 64
    max_active: int = 0
    wait: bool = False
    idle_timeout: float = math.inf
    read: float = math.inf
    write: float = math.inf
    block: float = math.inf
    delayed_key: str = DELAYED


NO_LIMITS = PoolLimits()


@functools.cache
def too_many_connections() -> type[Exception]:
    """Return the class of the error that says so: no server was asked, and none can help."""
    import redis

    return type("TooManyConnections", (redis.ConnectionError,), {})


class Quota:
    """Counts the connections of one process, and makes who wants one too many wait, or fail."""

    def __init__(self, limits: PoolLimits) -> None:
        self._most = limits.max_active
        self._wait = limits.wait
        self._count = 0
        self._changed = threading.Condition()

    def enter(self, timeout: float, spare: Callable[[], L | None]) -> L | None:
        """Return None when one more may be opened, or a connection that came back meanwhile.

        Args:
            spare: finds such a connection, or closes one that leads elsewhere.

        Raises:
            redis.ConnectionError: there are too many; its class is `too_many_connections()`.
        """
        if not self._most:
            return None
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._count >= self._most:
                found = spare()
                if found is not None:
                    return found
                if self._count < self._most:
                    break  # `spare` has closed one
                left = deadline - time.monotonic() if self._wait else 0.0
                if left <= 0 or not self._changed.wait(left):
                    self._refuse()
            self._count += 1
        return None

    def _refuse(self) -> None:
        hint = "raise it, or set redis.wait"
        if self._wait:
            hint = f"none came back in time, raise it above {self._most}"
        raise too_many_connections()(
            f"redis.max_active: {self._most} connections are in use ({hint})"
        )

    def leave(self) -> None:
        """Count one less: it was closed."""
        if self._most:
            with self._changed:
                self._count = max(0, self._count - 1)
                self._changed.notify()

    def came_back(self) -> None:
        """Tell those who wait that a connection is free, and is kept."""
        if self._most:
            with self._changed:
                self._changed.notify()
