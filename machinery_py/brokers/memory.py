"""Messages in this process: for tests, and the reference that the other brokers are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from machinery_py.brokers.base import BrokerFeatures
from machinery_py.brokers.rows import LEASE, RowsBroker
from machinery_py.brokers.topics import TOPIC_LENGTH, PushedSubscription
from machinery_py.connections.forks import ForkLock
from machinery_py.rows.messages import MessageRows


class _Topic:
    """The newest records of a topic, and its subscriptions."""

    def __init__(self) -> None:
        #: Each with when it came and until when it counts, by the monotonic clock.
        self.records: deque[tuple[bytes, float, float]] = deque(maxlen=TOPIC_LENGTH)
        self.subscriptions: list[PushedSubscription] = []

    def is_over(self, now: float) -> bool:
        """Forget closed subscriptions; return whether nobody needs the topic."""
        self.subscriptions = [one for one in self.subscriptions if not one.is_closed]
        return not self.subscriptions and all(until <= now for _, _, until in self.records)


class MemoryBroker(RowsBroker):
    """Rows in memory, and topics that are pushed to their subscriptions."""

    features = BrokerFeatures(
        name="memory",
        durable=False,
        shared=False,
        embedded=True,
        topics=True,
        keeps_topics=True,
        exact_limits=True,
        fair=True,
        forgets_queues=True,
    )

    def __init__(self, rows: MessageRows, *, lease: float = LEASE) -> None:
        super().__init__(rows, lease=lease)
        self._topics: dict[str, _Topic] = {}
        self._telling = ForkLock()

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        with self._telling:
            now = self.rows.clock.monotonic()
            for name in [name for name, other in self._topics.items() if other.is_over(now)]:
                del self._topics[name]
            there = self._topics.setdefault(topic, _Topic())
            there.records.extend((record, now, now + ttl) for record in records)
            for subscription in there.subscriptions:
                subscription.add((record, now + ttl) for record in records)

    def subscribe(self, topic: str, *, since: float = 0.0) -> PushedSubscription:
        with self._telling:
            there = self._topics.setdefault(topic, _Topic())
            subscription = PushedSubscription(self.rows.clock)
            there.subscriptions.append(subscription)
            oldest = self.rows.clock.monotonic() - since
            if since > 0:
                subscription.add((body, until) for body, at, until in there.records if at >= oldest)
            return subscription
