"""The overview that all readers share, and calls of the stores that end in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from machinery_py.config.urls import redact
from machinery_py.dashboard.fleet import Fleet
from machinery_py.dashboard.records import Overview, WorkerCounts
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.version import __version__

T = TypeVar("T")

FRESH = 1.0  # seconds that an overview is given out again
PATIENCE = 6.0  # seconds for a call of the stores; a client library gives up after 5
SHORT_PATIENCE = 2.0  # seconds for the overview, which has the last one to fall back on
MOST_CALLS = 16  # at a time
MOST_STREAMS = 16
STREAM_PAUSE = 2.0  # seconds between two overviews
# The page opens the next one. So a server that ends waits no longer for an open stream, and nobody
# reads on whose rights were taken away.
STREAM_LIFE = 10.0  # seconds


class StoreCalls:
    """Calls of the stores, each in a thread of its own: a store that hangs holds up no answer."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MOST_CALLS)

    def run(self, function: Callable[[], T], patience: float, note: str = "") -> T:
        """Return what the function returns, or raise what it raises.

        Raises:
            BrokerUnavailable: it goes on after so many seconds, or 16 others do.
        """
        end = time.monotonic() + patience
        silent = f"the store has not answered in {patience:g} s{note}"
        if not self._free.acquire(timeout=patience):
            raise BrokerUnavailable(silent)
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # ours to hand over, whatever it is
                future.set_exception(error)
            finally:
                self._free.release()

        try:
            threading.Thread(target=call, name="machinery-dashboard", daemon=True).start()
        except RuntimeError:  # the machine has no thread left
            self._free.release()
            raise
        try:
            return future.result(end - time.monotonic())
        except TimeoutError:
            if future.done():  # its own
                raise
            raise BrokerUnavailable(silent) from None


class Stream:
    """Server-sent events for one reader. Whoever reads it closes it.

    Args:
        overview: returns what is sent, as JSON.
        ended: ends it.
        release: called once, when it is closed.
    """

    def __init__(
        self, overview: Callable[[], bytes], ended: threading.Event, release: Callable[[], object]
    ) -> None:
        self._overview = overview
        self._ended = ended
        self._release: Callable[[], object] | None = release
        self._end = time.monotonic() + STREAM_LIFE

    def chunk(self) -> bytes:
        """Return the next event; nothing at the end."""
        if self._ended.is_set() or time.monotonic() > self._end:
            return b""
        return b"retry: 1000\ndata: %b\n\n" % self._overview()

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.chunk():
            yield chunk
            self._ended.wait(STREAM_PAUSE)

    def close(self) -> None:
        """Make room for another one. May be called twice."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Live:
    """The overview: at most one look at the stores in a second, however many read it."""

    def __init__(self, fleet: Fleet, calls: StoreCalls) -> None:
        self._fleet = fleet
        self._calls = calls
        self._lock = threading.Lock()
        self._last: Overview | None = None
        self._looked_at = 0.0
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._ended = threading.Event()

    def close(self) -> None:
        """End all streams; new ones end at once. May be called twice."""
        self._ended.set()

    def stream(self, overview: Callable[[], bytes]) -> Stream | None:
        """Return a new stream; None: there are too many."""
        if not self._streams.acquire(blocking=False):
            return None
        return Stream(overview, self._ended, self._streams.release)

    def overview(self) -> Overview:
        """Return the overview; of a store that does not answer, the last one, with the reason."""
        with self._lock:  # others wait for this look, and share it
            last = self._last or self._empty()
            if self._last is None or time.monotonic() - self._looked_at > FRESH:
                try:
                    last = self._calls.run(self._look, SHORT_PATIENCE)
                except MachineryError as error:
                    last = msgspec.structs.replace(last, trouble=str(error))
                self._last, self._looked_at = last, time.monotonic()
            return last

    def _empty(self) -> Overview:
        config = self._fleet.app.config
        broker = " ".join(map(redact, config.broker_urls))
        backend = redact(config.backend_url) if config.result_backend else broker
        return Overview(at=None, version=__version__, broker=broker, backend=backend)

    def _look(self) -> Overview:
        workers = self._fleet.inspect.workers()
        return msgspec.structs.replace(
            self._empty(),
            at=self._fleet.app.now(),
            queues=self._fleet.inspect.queues(),
            workers=WorkerCounts(alive=len(workers), stalled=sum(one.stalled for one in workers)),
        )
