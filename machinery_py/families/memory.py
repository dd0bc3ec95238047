"""`memory://`: one store in this process. `memory://name` is shared by all Servers of the process that name it."""

from __future__ import annotations

import weakref

from machinery_py._drivers.memory import MemoryHub
from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.families.base import Family, FamilyOptions
from machinery_py.forks import ForkLock
from machinery_py.locks.memory import MemoryLock
from machinery_py.settlement.one_store import OneStore
from machinery_py.urls import StoreUrl


class _Shared:
    """The stores behind one memory URL."""

    def __init__(self, options: FamilyOptions) -> None:
        self.hub = MemoryHub(options.clock)
        self.broker = MemoryBroker(self.hub, lease=options.lease)
        self.backend = MemoryBackend(self.hub, expire_in=options.expire_in)
        self.lock = MemoryLock(self.hub)


_named: weakref.WeakValueDictionary[str, _Shared] = weakref.WeakValueDictionary()
_naming = ForkLock()


class MemoryFamily(Family):
    """Stores under one lock."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        name = StoreUrl.parse(url).name
        with _naming:
            shared = _named.get(name) if name else None
            if shared is None:
                shared = _Shared(options)
                if name:
                    _named[name] = shared
        self._shared = shared

    def broker(self) -> MemoryBroker:
        return self._shared.broker

    def backend(self) -> MemoryBackend:
        return self._shared.backend

    def lock(self) -> MemoryLock:
        return self._shared.lock

    def together(self) -> OneStore:
        return OneStore(self._shared.broker, self._shared.backend, self._shared.hub.transaction)
