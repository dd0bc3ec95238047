"""Threads that loop: one frame for their start, their end and their failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from machinery_py.texts import get_logger

logger = get_logger(__name__)


class _Inside(threading.local):
    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


#: Whether this thread is in a call of a store, or does nothing else; see `Store.is_entered`.
INSIDE = _Inside()


class LoopThread:
    """A daemon thread that runs `body` once, until it returns; started and joined by its owner.

    Args:
        body: calls `pause` or `is_stopping`, and returns soon after `stop`.
        wake: ends what the body waits for besides `pause`; called by `stop`.
        inside: the body is in calls of stores, and never in user code; see `INSIDE`.

    Attributes:
        is_stopping: returns whether `stop` was called.
        pause: waits so many seconds, or until `stop`; returns whether the body is to return.
        failure: what the body raised; it is logged, and the owner acts on it.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[], object],
        *,
        wake: Callable[[], object] | None = None,
        inside: bool = False,
    ) -> None:
        self._name = name
        self._body = body
        self._wake = wake
        self._inside = inside
        stopping = threading.Event()
        self._stop: Final = stopping.set
        self.is_stopping: Final = stopping.is_set
        self.pause: Final = stopping.wait
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the body to return; does not wait for it. May be called twice, from any thread."""
        self._stop()
        if self._wake is not None:
            self._wake()

    def join(self, timeout: float) -> bool:
        """Wait for its end. False: it goes on. From inside the thread, or before `start`: True."""
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def _run(self) -> None:
        INSIDE.depth = int(self._inside)
        try:
            self._body()
        except BaseException as error:
            self.failure = error
            logger.exception("thread %s has died", self._name)


def is_owner(lock: Any) -> bool:
    """Return whether this thread holds the lock, which is a `threading.RLock`.

    Condition of the standard library asks in the same way.
    """
    return bool(lock._is_owned())
