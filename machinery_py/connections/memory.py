"""The hub of memory broker, backend and lock: one lock, and events that wake threads."""

from __future__ import annotations

import threading

from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.fences import FenceSequence


class MemoryHub:
    """One store in this process. `lock` is held for each step; its holder may enter it again."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.fences = FenceSequence(lambda: micros(clock.now()))
        self._notifiers: set[threading.Event] = set()

    def is_entered(self) -> bool:
        """Return whether this thread is inside a step."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def transaction(self) -> threading.RLock:
        return self.lock

    def add_notifier(self, notifier: threading.Event) -> None:
        with self.lock:
            self._notifiers.add(notifier)

    def remove_notifier(self, notifier: threading.Event) -> None:
        with self.lock:
            self._notifiers.discard(notifier)

    def notify(self) -> None:
        """Wake all threads that wait for messages. Called with the lock held."""
        for notifier in self._notifiers:
            notifier.set()
