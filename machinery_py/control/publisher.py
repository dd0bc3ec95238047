"""Publisher: sends the events of this process to all that have opened a stream of them.

It costs nothing while it is off: it subscribes to no event, so none is made, and no message has a
clock. When it is on, emitters only put their event into a queue; one thread sends what gathers in
GATHER seconds with one call.

    queue full, store away    events are lost, and counted: `lost`, told with each WorkerHeartbeat,
                              and with the next events to all streams, in `EventStream.missed`
    broker without topics     the same; one warning a minute
    fork                      the child has a queue and a thread of its own
    end of the process        the last GATHER seconds are lost, unless `close` is called
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from machinery_py.brokers.base import Broker
from machinery_py.connections import proc
from machinery_py.connections.forks import ForkLock
from machinery_py.control.lamport import LamportClock
from machinery_py.control.records import (
    EVENTS,
    EVENTS_TTL,
    clock_of,
    line_of,
    lost_line,
    packed,
)
from machinery_py.errors import MachineryError
from machinery_py.events import Event, EventBus, TaskReceived, TaskSent, WorkerHeartbeat
from machinery_py.tasks.signature import HEADER_CLOCK, Signature
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread
from machinery_py.version import __version__

logger = get_logger(__name__)

QUEUE = 10_000  # events
GATHER = 0.1  # seconds
WARN_EVERY = 60.0  # seconds
END_TIMEOUT = 2.0  # seconds to send what is left


class EventPublisher:
    """Publisher of one application. Any thread may use it.

    Attributes:
        is_on: whether events of this process are sent.
        lost: events that were to be sent and are not known to be.
    """

    def __init__(
        self,
        bus: EventBus,
        lamport: LamportClock,
        *,
        now: Callable[[], dt.datetime],
        broker: Callable[[], Broker],
    ) -> None:
        self._bus = bus
        self._lamport = lamport
        self._now = now
        self._broker = broker
        self._lock = ForkLock(reentrant=True)
        self._unsubscribe: Callable[[], None] | None = None
        self._host, self._pid = "", 0
        self._lines: deque[bytes] = deque()
        self._news = threading.Event()
        self._loop: LoopThread | None = None
        self._warn_at = 0.0
        self.is_on: bool = False
        self.lost: int = 0
        self._untold = 0  # of the lost ones; streams hear of them with the next events

    def enable(self) -> None:
        """Send events from now on. Opens nothing before the first one. May be called twice."""
        with self._lock:
            if self._unsubscribe is None:
                self._unsubscribe = self._bus.subscribe(Event, self._take)
                self.is_on = True

    def disable(self) -> None:
        """Make and send no more events; what was emitted is still sent. May be called twice."""
        with self._lock:
            end, self._unsubscribe = self._unsubscribe, None
            self.is_on = False
        if end is not None:
            end()
        self.close()

    def stamped(self, signature: Signature[Any]) -> Signature[Any]:
        """Return it with the logical clock of its sending, which it carries to its worker."""
        return signature.with_headers(**{HEADER_CLOCK: str(self._lamport.forward())})

    def clock_to_send(self) -> int:
        """Return the logical clock of a call to another process, or of its answer; 0: it is off."""
        return self._lamport.forward() if self.is_on else 0

    def follow(self, clock: int) -> None:
        """Be on or off as the process that has sent this, and go on from its clock."""
        if clock:
            self.enable()
            self._lamport.adjust(clock)
        elif self.is_on:
            self.disable()

    def emit_heartbeat(
        self, *, worker: str, active: int, processed: int, slots: int, interval: float
    ) -> None:
        """Emit a worker's heartbeat, with what is known of its process and its host."""
        if WorkerHeartbeat in self._bus.wanted:
            self._bus.emit(
                WorkerHeartbeat(
                    worker=worker,
                    active=active,
                    processed=processed,
                    slots=slots,
                    interval=interval,
                    load=proc.load(),
                    version=__version__,
                    platform=sys.platform,
                    lost=self.lost,
                )
            )

    def close(self) -> None:
        """Send what is left, for END_TIMEOUT at most. The next event starts all anew."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._pid == os.getpid():
            loop.stop()
            loop.join(END_TIMEOUT)

    # In the thread of an emitter

    def _take(self, event: Event) -> None:
        if self._loop is None or self._pid != os.getpid():
            try:
                self._begin()
            except RuntimeError as error:  # there is no thread to be had
                self._lose(1, str(error))
                return
        if type(event) is TaskSent:
            # That of its message: smaller than that of the receipt, which may come first.
            clock = clock_of(event.signature) or self._lamport.forward()
        elif type(event) is TaskReceived:
            clock = self._lamport.adjust(clock_of(event.signature))
        else:
            clock = self._lamport.forward()
        if len(self._lines) >= QUEUE:
            self._lose(1, f"more than {QUEUE:,} are waiting")
            return
        where = {
            "worker": event.worker or f"{self._host}-{self._pid}",
            "at": self._now(),
            "host": self._host,
            "pid": self._pid,
            "clock": clock,
        }
        try:
            line = line_of(event, where)
        except (TypeError, ValueError) as error:  # half a surrogate pair, or a program's own event
            self._lose(1, str(error))
            return
        self._lines.append(line)
        if not self._news.is_set():
            self._news.set()

    def _begin(self) -> None:
        with self._lock:
            if self._pid != os.getpid():  # what the parent had is sent by the parent
                self._host, self._pid = socket.gethostname(), os.getpid()
                self._lines, self._news, self._loop = deque(), threading.Event(), None
                self._untold = 0
            if self._loop is None:
                loop = LoopThread("machinery-events", lambda: self._work(loop), wake=self._news.set)
                loop.start()
                self._loop = loop

    # In the thread of its own

    def _work(self, loop: LoopThread) -> None:
        is_last = False
        while not is_last:
            self._news.wait()
            is_last = loop.pause(GATHER)
            self._news.clear()
            lines: list[bytes] = []
            with suppress(IndexError):  # the thread that `close` has left takes some, too
                while len(lines) < QUEUE:
                    lines.append(self._lines.popleft())
            untold = self._untold
            told = [lost_line(untold)] if untold else []
            try:
                if lines or told:
                    records = [*packed([*told, *lines])]
                    self._broker().broadcast(EVENTS, records, ttl=EVENTS_TTL)
                    with self._lock:
                        self._untold -= untold
            except MachineryError as error:
                self._lose(len(lines), str(error))
            except Exception as error:  # the loop must live on, or no event is sent any more
                logger.exception("events could not be sent")
                self._lose(len(lines), repr(error))

    def _lose(self, count: int, why: str) -> None:
        with self._lock:
            self.lost += count
            self._untold += count
            if time.monotonic() < self._warn_at:
                return
            self._warn_at = time.monotonic() + WARN_EVERY
        logger.warning("events are lost: %s (%d of this process so far)", why, self.lost)
