"""Stream: the events of all processes whose events are on, as they come; and cameras."""

from __future__ import annotations

import datetime as dt
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, Self, TypeVar, overload

from machinery_py.async_twins import twin
from machinery_py.brokers.base import Broker
from machinery_py.brokers.topics import Subscription
from machinery_py.call_threads import taking
from machinery_py.clock import ABOVE_ZERO, Seconds, seconds_of
from machinery_py.control.fleet import FleetState
from machinery_py.control.lamport import LamportClock
from machinery_py.control.publisher import EventPublisher
from machinery_py.control.records import EVENTS, event_of, lost_in
from machinery_py.errors import MachineryError, Unsupported
from machinery_py.events import Event, EventBus, kinds_of
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread
from machinery_py.values.malformed import MALFORMED

logger = get_logger(__name__)

READ_TIMEOUT = 1.0  # seconds; bounds how late a cancelled coroutine's thread ends
PAUSE = 1.0  # seconds until a store that is away is asked again
WARN_EVERY = 60.0  # seconds
JOIN = 10.0  # seconds that the thread of a camera gets to end

E = TypeVar("E", bound=Event)


class EventStream(Generic[E]):
    """The events that are sent while it is open, to iterate over: `with`, or `async with`.

    Events that come together are in the order of their stamps. While the broker is away the stream
    waits. One thread or coroutine reads it; `close` may be called from any, and ends the iteration.

    Attributes:
        missed: what was lost: events that their process could not send, and records, of up to 200
            events, that this reader was too slow for.
        since: seconds of the past that it begins with; 0 where the broker keeps none.
    """

    def __init__(
        self, broker: Callable[[], Broker], kinds: Iterable[type[E]], *, since: Seconds = 0.0
    ) -> None:
        self._broker = broker
        self._kinds: dict[str, type[Event]] = {
            each.__name__: each for kind in kinds for each in kinds_of(kind)
        }
        self.since: float = seconds_of("since", since)
        self._subscription: Subscription | None = None
        self._found: deque[E] = deque()
        self._lost = 0  # by their processes
        self._lock = threading.Lock()  # of the thread that reads
        self._closed = threading.Event()
        self._is_away = False
        self._warn_at = 0.0

    @property
    def missed(self) -> int:
        slow = self._subscription.missed if self._subscription is not None else 0
        return slow + self._lost

    def open(self) -> None:
        """Begin to listen; `with` and the first read do it.

        Raises:
            BrokerUnavailable: it is away.
            Unsupported: this broker has no topics.
        """
        if self._subscription is None:
            broker = self._broker()
            self._subscription = broker.subscribe(EVENTS, since=self.since)
            self.since *= broker.features.keeps_topics
            if self._closed.is_set():  # meanwhile
                self._subscription.close()

    def close(self) -> None:
        """End the stream, and what waits for it. May be called twice."""
        self._closed.set()
        if self._subscription is not None:
            self._subscription.close()

    def read(self, timeout: Seconds) -> list[E]:
        """Return the events since the last call; waits up to `timeout` for the first."""
        deadline = time.monotonic() + seconds_of("timeout", timeout, least=-math.inf)
        while not self._fill(max(0.0, deadline - time.monotonic())):
            if self._closed.is_set() or time.monotonic() >= deadline:
                return []
        found = list(self._found)
        self._found.clear()
        return found

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> E:
        while not self._fill(READ_TIMEOUT):
            if self._closed.is_set():
                raise StopIteration
        return self._found.popleft()

    async def __aenter__(self) -> Self:
        return await taking(self.__enter__, lambda stream: stream.close())

    __aexit__: Final = twin(__exit__, goes_on=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        while not self._found and not await self._fill_async(READ_TIMEOUT):
            if self._closed.is_set():
                raise StopAsyncIteration
        return self._found.popleft()

    def _fill(self, timeout: float) -> bool:
        """Wait for events that are not handed out yet; return whether there are any."""
        with self._lock:  # a cancelled coroutine may have left a thread in here
            if not self._found and not self._closed.is_set():
                lines = b"\n".join(self._records(timeout)).split(b"\n")
                events = [one for line in lines if (one := self._read(line)) is not None]
                self._found.extend(sorted(events, key=lambda one: one.stamp))
            return bool(self._found)

    _fill_async = twin(_fill)

    def _records(self, timeout: float) -> list[bytes]:
        try:
            self.open()
            assert self._subscription is not None
            records = self._subscription.read(timeout)
        except Unsupported:
            raise
        except MachineryError as error:
            if not self._is_away:
                logger.warning("events cannot be read: %s; the stream waits", error)
            self._is_away = True
            self._closed.wait(min(PAUSE, timeout))
            return []
        self._is_away = False
        return records

    def _read(self, line: bytes) -> Any:
        try:
            if lost := lost_in(line):
                self._lost += lost
                return None
            return event_of(line, self._kinds) if line else None
        except MALFORMED as error:
            if time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + WARN_EVERY
                logger.warning("a record on topic %r is not of events: %s", EVENTS, error)
            return None


class Camera:
    """Thread that keeps the state of the fleet and shows it to a function at fixed times."""

    def __init__(
        self, stream: EventStream[Any], seconds: float, function: Callable[[FleetState], object]
    ) -> None:
        self.state: Final = FleetState()
        self.is_stopped: bool = False
        self._stream = stream
        self._seconds = seconds
        self._function = function
        self._loop = LoopThread("machinery-camera", self._work, wake=stream.close)
        self._loop.start()

    def stop(self, timeout: Seconds = JOIN) -> None:
        """End it, after a call that goes on now. May be called twice."""
        length = max(0.0, seconds_of("timeout", timeout, least=-math.inf))
        self.is_stopped = True
        self._loop.stop()
        self._loop.join(length)

    def _work(self) -> None:
        begun = time.monotonic()
        due = begun + self._seconds
        while not self._loop.is_stopping():
            try:
                self.state.apply(self._stream.read(min(READ_TIMEOUT, due - time.monotonic())))
                self.state.since = begun - self._stream.since
                now = time.monotonic()
                if now >= due and not self._loop.is_stopping():
                    # From the planned moment on, without those that were missed.
                    due += self._seconds * (1 + (now - due) // self._seconds)
                    self._function(self.state)
            except (Exception, SystemExit):  # user code, or a store: the camera goes on
                logger.exception("camera %r failed", self._function)
                self._loop.pause(PAUSE)


class ServerEvents(EventBus):
    """Events of this process, and of all processes: `server.events`.

    Attributes:
        publisher: sends those of this process.
    """

    def __init__(
        self, lamport: LamportClock, *, now: Callable[[], dt.datetime], broker: Callable[[], Broker]
    ) -> None:
        super().__init__()
        self.publisher: Final = EventPublisher(self, lamport, now=now, broker=broker)
        self._broker = broker
        self._cameras: list[Camera] = []

    def enable(self) -> None:
        """Send the events of this process from now on, as the setting `events` does."""
        self.publisher.enable()

    def disable(self) -> None:
        """End that. Waits up to 2 s until those of before are sent."""
        self.publisher.disable()

    @overload
    def stream(self, *, since: Seconds = 0.0) -> EventStream[Event]: ...
    @overload
    def stream(self, *kinds: type[E], since: Seconds = 0.0) -> EventStream[E]: ...
    def stream(self, *kinds: type[Any], since: Seconds = 0.0) -> EventStream[Any]:
        """Return a stream of the events of all processes that send theirs.

        Args:
            kinds: classes of events, or their bases; by default all.
            since: begin with the events of so many seconds (or a timedelta) before, where the
                broker keeps them.

        Raises:
            TypeError: one is no class of events.
            ValueError: `since` is negative.
        """
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, Event)):
                raise TypeError(f"stream: found {kind!r} (expected classes of machinery_py.events)")
        return EventStream(self._broker, kinds or (Event,), since=since)

    def every(
        self, seconds: Seconds, camera: Callable[[FleetState], object], *, since: Seconds = 0.0
    ) -> Camera:
        """Call `camera` every so many seconds with the state of all that the stream has told.

        It is called in a thread of its own, until `stop` of what is returned, or the end of the
        process. Its exceptions are logged.

        Args:
            since: as for `stream`.

        Raises:
            TypeError, ValueError: the seconds are not more than 0, or `since` is negative.
            Unsupported: this broker has no topics.
        """
        pause = seconds_of("seconds", seconds, least=ABOVE_ZERO)
        stream = self.stream(since=since)
        if not self._broker().features.topics:
            self._broker().subscribe(EVENTS)  # raises, in the broker's words
        started = Camera(stream, pause, camera)
        self._cameras = [one for one in self._cameras if not one.is_stopped] + [started]
        return started

    def close(self) -> None:
        """End the cameras. May be called twice."""
        while self._cameras:
            self._cameras.pop().stop()
