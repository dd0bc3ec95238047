"""The guard of a worker process: it ends the process when a task has closed descriptors that the worker lives on.

After `os.closerange` in a task all looks well: heartbeats go out, and threads wait on numbers that mean nothing any more, or
mean another file by now, which they would write into. Such a process cannot be trusted with anything, so it ends at once. What
it ran runs again, and has a strike, also if its function has returned: it could be the one that would do so for ever. Below a
supervisor the guard also tells every BEAT that threads of this process still run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from machinery_py.cli.processes import BEAT, ParentPipe
from machinery_py.connections import descriptors
from machinery_py.texts import get_logger

logger = get_logger(__name__)

LOOK = 0.5  # seconds between two looks
PATIENCE = 1.0  # seconds; a store may have to be asked, of whose connections some are gone
BROKEN = 1  # exit code of a worker that could not go on
STDERR = 2
HIGH = (
    100  # a copy of stderr has at least this number, out of the way of those who close the low ones
)


class Guard:
    """Looks in a thread of its own. A context. `blame` is called before the end, if that takes no longer than PATIENCE."""

    def __init__(self, link: ParentPipe, blame: Callable[[], object]) -> None:
        self._link = link
        self._blame = blame
        self._stop = threading.Event()
        self._ending = threading.Lock()  # never given back
        self._thread = threading.Thread(target=self._work, name="machinery-guard", daemon=True)
        self._stderr = _copy_of_stderr()

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=LOOK)

    def _work(self) -> None:
        beat_at = 0.0
        while not self._stop.wait(LOOK):
            self.look()
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT
                self._link.tell("beat")

    def look(self) -> None:
        """End the process if descriptors are broken. From any thread; also before a worker stops that cannot go on."""
        if descriptors.broken():
            self._end()

    def _end(self) -> None:
        self._ending.acquire()
        with suppress(OSError):
            os.dup2(self._stderr, STDERR)  # whatever has that number now: it is used no more
        try:
            logger.critical(
                "a task has closed descriptors of this worker: ending at once; what it ran will run again"
            )
            thread = threading.Thread(target=self._blame, daemon=True)
            thread.start()
            thread.join(timeout=PATIENCE)
        finally:
            os._exit(BROKEN)


def _copy_of_stderr() -> int:
    try:
        import fcntl

        copy = fcntl.fcntl(STDERR, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except (ImportError, OSError):
        return -1
    descriptors.keep(copy)
    return copy
