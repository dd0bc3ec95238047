"""Messages as a store keeps them, dead letters and workers: what several stores share."""

from __future__ import annotations

import datetime as dt
import math
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from machinery_py.brokers.base import (
    WAITING,
    Consumer,
    DeadLetter,
    Delivery,
    Disposal,
    Message,
    WorkerInfo,
)
from machinery_py.clock import Clock
from machinery_py.errors import MachineryError
from machinery_py.fences import Fence
from machinery_py.tasks.signature import HEADER_RUN

SET_BACK = 60.0  # seconds; a smaller step of a clock delays retries by so much
RETRY_MARK = f'"{HEADER_RUN}":'.encode()  # in the bytes of a retry: its ETA was a delay


class ClockWatch:
    """Notice of a wall clock that was set back, as seen by one that never is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._off = math.inf

    def was_set_back(self) -> bool:
        """Return whether it was since the last call; of what was before the first one, True."""
        before, self._off = self._off, self._clock.now().timestamp() - self._clock.monotonic()
        return self._off < before - SET_BACK


def new_letter(
    message: Message,
    died_at: dt.datetime,
    *,
    reason: str,
    error: str,
    queue: str = "",
    uuid: str = "",
    name: str = "",
    strikes: int = 0,
) -> DeadLetter:
    """Return a dead letter with an id of its own.

    Queue, UUID and name are the message's if they are empty.
    """
    return DeadLetter(
        id=secrets.token_hex(16),
        uuid=uuid or message.uuid,
        name=name or message.name,
        queue=queue or message.queue,
        body=message.body,
        reason=reason,
        error=error,
        strikes=strikes,
        died_at=died_at,
    )


class Entry(msgspec.Struct):
    """A message in the hands of a store, with what it counts, for stores that keep records."""

    message: Message
    sent_at: dt.datetime
    count: int = 0
    strikes: int = 0

    def deliver(self, receipt: Any, fence: Fence) -> Delivery:
        """Return the next handing-over of the message."""
        self.count += 1
        return Delivery(
            body=self.message.body,
            queue=self.message.queue,
            receipt=receipt,
            count=self.count,
            fence=fence,
            strikes=self.strikes,
            parks=self.message.parks,
            priority=self.message.priority,
            sent_at=self.sent_at,
        )

    def put_off(self, disposal: Disposal) -> None:
        """Let the message wait as Fate.LATER says.

        Listings show it as it waits now, not as it was sent.
        """
        parks = self.message.parks + (disposal.reason != WAITING)
        self.message = msgspec.structs.replace(self.message, eta=disposal.eta, parks=parks)

    def letter(self, disposal: Disposal, died_at: dt.datetime) -> DeadLetter:
        """Return the dead letter that Fate.DEAD makes of the message."""
        return new_letter(
            self.message,
            died_at,
            reason=disposal.reason,
            error=disposal.error,
            uuid=disposal.uuid,
            name=disposal.name,
            strikes=self.strikes,
        )


def new_worker(name: str, queues: Sequence[str], now: dt.datetime) -> WorkerInfo:
    """Return the record of a consumer in this process, with a new session."""
    return WorkerInfo(
        session=secrets.token_hex(12),
        name=name,
        host=socket.gethostname(),
        pid=os.getpid(),
        queues=tuple(queues),
        started_at=now,
        beat_at=now,
    )


def close_all(consumers: Iterable[Consumer]) -> None:
    """Close each of them, also after one that failed; the last failure is raised then."""
    failure: MachineryError | None = None
    for consumer in list(consumers):
        try:
            consumer.close()
        except MachineryError as error:
            failure = error
    if failure is not None:
        raise failure
