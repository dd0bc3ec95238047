"""Lines between two processes, over a pipe or a socket that nobody waits at."""

from __future__ import annotations

import os
from collections.abc import Callable

from machinery_py.connections.forks import ForkLock


class LineReader:
    """Reads lines from a descriptor without waiting for them."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_at_end: bool = False  # every writer has closed it
        self._unread = b""
        os.set_blocking(descriptor, False)

    def read(self) -> list[str]:
        """Return the lines since the last call."""
        try:
            while chunk := os.read(self.descriptor, 65536):
                self._unread += chunk
            self.is_at_end = True
        except OSError:
            pass  # nothing more for now
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode("utf-8", "surrogateescape") for line in lines]


class LineWriter:
    """Writes lines, in order and whole. May be used from any thread.

    What a reader that is stopped does not take is kept, and written with the next line.

    Args:
        write: of a descriptor that does not block.
    """

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._left = b""
        self._lock = ForkLock()

    def write(self, line: str, *, can_be_dropped: bool = False) -> bool:
        """Write a line. False: nobody reads any more.

        Args:
            can_be_dropped: if the line before it is still unread.
        """
        with self._lock:
            if not (self._left and can_be_dropped):
                self._left += f"{line}\n".encode("utf-8", "surrogateescape")
            try:
                while self._left:
                    self._left = self._left[self._write(self._left) :]
            except BlockingIOError:
                pass
            except OSError:
                return False
        return True
