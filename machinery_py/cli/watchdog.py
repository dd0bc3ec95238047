"""The watchdog of a worker: ends the process when a task has closed descriptors of the worker.

After `os.closerange` in a task all looks well: heartbeats go out, and threads wait on numbers that
mean nothing any more, or mean another file by now, which they would write into. Such a process
cannot be trusted with anything, so it ends at once. Its tasks run again, each with a strike, also
one whose function has returned: it could be the one that closes descriptors every time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from machinery_py.connections import descriptors
from machinery_py.texts import get_logger

logger = get_logger(__name__)

PATIENCE = 1.0  # seconds; a store may have to be asked that has lost some of its connections
BROKEN = 1  # exit code of a worker that could not go on
STDERR = 2
HIGH = 100  # the least number of the copy of stderr; whoever closes the low ones leaves it alone


class Watchdog:
    """Checks the descriptors, with each sign of life.

    Args:
        stderr: what `copy_of_stderr` has returned.
        blame: called before the end, for at most PATIENCE.
    """

    def __init__(self, stderr: int, blame: Callable[[], object]) -> None:
        self._stderr = stderr
        self._blame = blame
        self._ending = threading.Lock()  # never given back

    def check(self) -> None:
        """End the process if descriptors are broken. May be called from any thread."""
        if not descriptors.broken():
            return
        self._ending.acquire()
        with suppress(OSError):
            os.dup2(self._stderr, STDERR)  # whatever has that number now is used no more
        try:
            logger.critical(
                "a task has closed descriptors of this worker: ending at once; "
                "what it ran will run again"
            )
            thread = threading.Thread(target=self._blame, daemon=True)
            thread.start()
            thread.join(timeout=PATIENCE)
        finally:
            os._exit(BROKEN)


def copy_of_stderr() -> int:
    """Return a copy that tasks leave alone; -1 if there is none."""
    try:
        import fcntl

        copy = fcntl.fcntl(STDERR, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except (ImportError, OSError):
        return -1
    descriptors.keep(copy)
    return copy
