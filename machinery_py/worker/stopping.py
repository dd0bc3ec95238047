"""Requests to stop a worker: `quit`, `abort` (any thread), SIGINT and SIGTERM (the main one)."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from machinery_py.connections import forks
from machinery_py.texts import get_logger

logger = get_logger(__name__)

SIGNALS = signal.SIGINT, signal.SIGTERM


class StopRequest:
    """Request to a worker to end, in order or at once.

    Attributes:
        is_made: it is to end when the running tasks are done.
        is_abrupt: it is to end now; what runs goes back to its queue.

    Args:
        grace: seconds that running tasks have, for the log.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        # A signal handler may interrupt the reader: SimpleQueue.put is safe then, Event.set is not.
        self._signals: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self.clear()

    def clear(self) -> None:
        """Forget the request, for a worker that is started again."""
        self.is_made: bool = False
        self.is_abrupt: bool = False

    def quit(self) -> None:
        self.is_made = True
        self.wake()

    def abort(self) -> None:
        self.is_abrupt = True
        self.quit()

    def wake(self) -> None:
        """End a `wait`."""
        self._signals.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for a signal or `wake`, at most this long, and act on the signal."""
        try:
            number = self._signals.get(timeout=seconds)
        except queue.Empty:
            return
        if number is None:
            return
        if self.is_made:
            logger.warning("second %s: stopping now", number.name)
            self.is_abrupt = True
        else:
            logger.info(
                "%s: stopping when the running tasks are done "
                "(at most %g s; once more to stop now)",
                number.name,
                self._grace,
            )
            self.is_made = True

    @contextlib.contextmanager
    def by_signals(self, wanted: bool) -> Iterator[None]:
        """Handle SIGINT and SIGTERM meanwhile, if `wanted` and in the main thread."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        numbers = SIGNALS if wanted and in_main_thread else ()
        previous = {number: forks.handle(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.put(signal.Signals(number))
