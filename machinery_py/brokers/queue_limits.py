"""The setting `queue_limits`: how many messages may wait in a queue.

What a sender submits comes to a queue only if there is room. What a worker sends in a settlement
(retries, callbacks, next steps), what schedules send and what comes due is never refused: it
belongs to something that was accepted before.
"""

from __future__ import annotations

import msgspec

from machinery_py.errors import QueueFull


class QueueLimit(msgspec.Struct, frozen=True, gc=False):
    """The most messages that may wait in a queue behind a put.

    Attributes:
        adds: how many of the put come to this queue at once, without a delay.
    """

    queue: str
    limit: int
    adds: int

    def check(self, waiting: int) -> None:
        """Raise QueueFull unless there is room for the put behind so many waiting messages."""
        if waiting + self.adds > self.limit:
            raise self.passed(waiting)

    def passed(self, waiting: int) -> QueueFull:
        """Return the error that so many waiting messages leave no room."""
        return QueueFull(self.queue, waiting=waiting, limit=self.limit, adds=self.adds)
