"""States and groups in this process, for tests, and as the reference for the other backends.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence

from machinery_py.backends.base import BackendFeatures, Listener
from machinery_py.backends.mappings import MappingBackend, Tables
from machinery_py.connections.memory import MemoryHub


class MemoryBackend(MappingBackend):
    """Dicts under the hub's lock."""

    features = BackendFeatures(
        name="memory", durable=False, shared=False, embedded=True, claims=True
    )

    def __init__(self, hub: MemoryHub, *, expire_in: float = 3600.0) -> None:
        super().__init__(hub.clock, expire_in=expire_in)
        self.hub = hub
        self._kept = Tables()
        self._listeners: set[MemoryListener] = set()

    def is_entered(self) -> bool:
        return self.hub.is_entered()

    def _transaction(self) -> contextlib.AbstractContextManager[object]:
        return self.hub.lock

    @property
    def _tables(self) -> Tables:
        return self._kept

    def _next_epoch(self, epoch: int) -> int:
        return self.hub.fences.next()

    def _finished(self, uuids: Sequence[str]) -> None:
        for listener in self._listeners:
            listener.notify(uuids)

    def listener(self) -> MemoryListener:
        listener = MemoryListener(self)
        with self.hub.lock:
            self._listeners.add(listener)
        return listener

    def drop_listener(self, listener: MemoryListener) -> None:
        with self.hub.lock:
            self._listeners.discard(listener)


class MemoryListener(Listener):
    """An event that is set when a watched task finishes."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend
        self._event = threading.Event()
        self._watched: set[str] = set()

    def watch(self, uuids: Iterable[str]) -> None:
        with self._backend.hub.lock:
            self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._backend.hub.lock:
            self._watched.difference_update(uuids)

    def notify(self, uuids: Sequence[str]) -> None:
        """Wake the waiter if it watches one of these. Called with the lock held."""
        if not self._watched.isdisjoint(uuids):
            self._watched.difference_update(uuids)
            self._event.set()

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._backend.drop_listener(self)
