"""Topics: records for all that listen now, such as events and orders.

A topic needs no declaration. A record goes to every subscription that is open when it is sent, and
is kept by the store, if that can, for those that ask for what was sent before. Records are lost
rather than waited for: a topic keeps its newest TOPIC_LENGTH records, each for its `ttl`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from machinery_py.clock import Clock
from machinery_py.errors import PublishRefused, for_good
from machinery_py.texts import quoted

TOPIC_LENGTH = 2000  # records of one topic
TOPIC_AGE = 3600.0  # seconds; a greater `ttl` counts as this
MAX_RECORD = 65_536  # bytes
READ = 500  # records of one look

KeptRecord = tuple[Any, int, bytes | None]
"""Place among all records of the store, number in its topic, from 1, and body; None: it is over."""


class Subscription(ABC):
    """The records of one topic, from `Broker.subscribe` on. `read` belongs to one thread.

    It survives a restart of its server by itself; what was sent meanwhile may be lost.

    Attributes:
        missed: records that are known to have been dropped before they were read: the reader was
            too slow, or they were too old.
    """

    missed: int = 0

    @abstractmethod
    def read(self, timeout: float) -> list[bytes]:
        """Return the records since the last call, oldest first.

        If there are none, waits up to `timeout` seconds for the first one, or until `wake`; may
        return early with nothing. Records are bytes as they were sent, whoever sent them. After
        `close`: nothing, at once.

        Raises:
            BrokerUnavailable, StoreUnusable: call again later.
        """

    @abstractmethod
    def wake(self) -> None:
        """Let a waiting `read`, or else the next one, return. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """End the subscription without fail; a waiting `read` returns. May be called twice."""


class KeptSubscription(Subscription):
    """Records that the store keeps: each look asks for those behind the last one that was read."""

    missed: int = 0

    def __init__(self) -> None:
        self._after: Any = None  # place of the last record that was read
        self._next = 0  # number of the next one; 0: any
        self._woken = self._closed = False

    @abstractmethod
    def _fetch(self, wait: float) -> list[KeptRecord]:
        """Return records behind `_after`; waits for some up to so many seconds, or less."""

    def read(self, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        while not self._closed:
            woken, left = self._woken, max(0.0, deadline - time.monotonic())
            found = self._passed(self._fetch(0.0 if woken else left))
            if found or woken or time.monotonic() >= deadline:
                self._woken = self._woken and not woken
                return found
        return []

    def _passed(self, records: Sequence[KeptRecord]) -> list[bytes]:
        """Go on behind these records, and return those that are not over."""
        found = [body for _, _, body in records if body is not None]
        if records:
            (_, first, _), (self._after, last, _) = records[0], records[-1]
            # A topic that the store has lost begins with 1 again.
            expected = self._next if 0 < self._next <= first else first
            self._next = last + 1
            self.missed += max(0, self._next - expected - len(found))
        return found

    def wake(self) -> None:
        self._woken = True

    def close(self) -> None:
        self._closed = True
        self.wake()


class PushedSubscription(Subscription):
    """Records that come to this process by themselves: the newest TOPIC_LENGTH that are unread."""

    missed: int = 0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: deque[tuple[bytes, float]] = deque()
        self._changing = threading.Lock()
        self._news = threading.Event()
        self.is_closed: bool = False

    def add(self, records: Iterable[tuple[bytes, float]]) -> None:
        """Take records in, each with the moment of the monotonic clock at which it is over."""
        with self._changing:
            self._records.extend(records)
            while len(self._records) > TOPIC_LENGTH:
                self._records.popleft()
                self.missed += 1
            self._news.set()

    def read(self, timeout: float) -> list[bytes]:
        self._news.wait(timeout)
        with self._changing:
            now = self._clock.monotonic()
            found = [body for body, until in self._records if now < until]
            self.missed += len(self._records) - len(found)
            self._records.clear()
            if self.is_closed:
                return []
            self._news.clear()
            return found

    def wake(self) -> None:
        self._news.set()

    def close(self) -> None:
        self.is_closed = True
        self.wake()


def checked_records(topic: str, records: Sequence[bytes]) -> list[bytes]:
    """Return the records, if none of them is too large for a topic.

    Raises:
        PublishRefused: it is permanent.
    """
    size = max(map(len, records), default=0)
    if size > MAX_RECORD:
        raise for_good(
            PublishRefused(
                f"topic {quoted(topic)}: a record has {size:,} bytes (at most {MAX_RECORD:,})"
            )
        )
    return list(map(bytes, records))
