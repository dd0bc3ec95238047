"""Topics: records for all that listen now, such as events and orders.

A topic needs no declaration. A record goes to every subscription that is open when it is sent, and
is kept by the store, if that can, for those that ask for what was sent before. Records are lost
rather than waited for: a topic keeps its newest TOPIC_LENGTH records, each for its `ttl`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from machinery_py.clock import Clock
from machinery_py.errors import PublishRefused, for_good
from machinery_py.texts import quoted

TOPIC_LENGTH = 2000  # records of one topic
TOPIC_AGE = 3600.0  # seconds; a greater `ttl` counts as this
MAX_RECORD = 65_536  # bytes


class Subscription(ABC):
    """The records of one topic, from `Broker.subscribe` on. `read` belongs to one thread.

    It survives a restart of its server by itself; what was sent meanwhile may be lost.

    Attributes:
        missed: records that are known to have been dropped before they were read: the reader was
            too slow, or they were too old.
    """

    missed: int = 0
    _next: int = 0  # running number of the next record, where the store has such; 0: any

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
        """End the subscription, and let a waiting `read` return. May be called twice."""

    def _pass(self, numbers: Sequence[int], handed_out: int) -> None:
        """Go on behind records with these running numbers, and count those that were missed.

        Args:
            numbers: growing by one where nothing was dropped. A topic that its store has lost
                begins with 1 again.
            handed_out: how many of them are no older than their `ttl`.
        """
        first, self._next = self._next, numbers[-1] + 1
        if not 0 < first <= numbers[0]:
            first = numbers[0]
        self.missed += max(0, self._next - first - handed_out)


class BufferedSubscription(Subscription):
    """Records that have come to this process and were not read yet, the newest TOPIC_LENGTH."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: deque[tuple[bytes, float]] = deque()
        self._changing = threading.Lock()
        self._news = threading.Event()
        self._closed = False

    def add(self, records: Iterable[tuple[bytes, float]], *, missed: int = 0) -> None:
        """Take records in, each with the moment of the monotonic clock at which it is over."""
        with self._changing:
            self._records.extend(records)
            self.missed += missed
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
            if self._closed:
                return []
            self._news.clear()
            return found

    def wake(self) -> None:
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()


def check_records(topic: str, records: Sequence[bytes]) -> None:
    """Refuse records that are too large for a topic.

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
