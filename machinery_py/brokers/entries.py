"""Dead letters, workers and clocks: what several brokers share."""

from __future__ import annotations

import datetime as dt
import math
import os
import secrets
import socket
from collections.abc import Iterable, Sequence

from machinery_py.brokers.base import Consumer, DeadLetter, Message, WorkerInfo
from machinery_py.clock import Clock
from machinery_py.errors import MachineryError
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
