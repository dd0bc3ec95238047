"""What the memory broker, backend and lock share: one lock, and the bells that wake whoever waits."""

from __future__ import annotations

import threading

from machinery_py.clock import SYSTEM_CLOCK, Clock


class MemoryHub:
    """One store in this process. `lock` is held for each step; it may be entered again by the thread that holds it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self._bells: set[threading.Event] = set()

    def transaction(self) -> threading.RLock:
        return self.lock

    def add_bell(self, bell: threading.Event) -> None:
        with self.lock:
            self._bells.add(bell)

    def remove_bell(self, bell: threading.Event) -> None:
        with self.lock:
            self._bells.discard(bell)

    def ring(self) -> None:
        """Wake all who wait for messages. Called with the lock held."""
        for bell in self._bells:
            bell.set()
