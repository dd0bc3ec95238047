"""A wait for other threads of the process and for file descriptors, at the same time."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress


class Wakeup:
    """Lets a thread wait for others of its process, and for file descriptors."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        """Let `wait` return. May be called from any thread."""
        with suppress(OSError):  # full: it returns anyway; closed: the relay has ended
            self._writer.send(b"\0")

    def wait(self, timeout: float, sources: Sequence[int]) -> None:
        with selectors.DefaultSelector() as selector:
            for one in {self._reader.fileno(), *sources}:
                selector.register(one, selectors.EVENT_READ)
            selector.select(timeout)
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
