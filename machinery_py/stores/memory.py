"""`memory://`: one store in this process. `memory://name` is shared by all Servers of the process that name it."""

from __future__ import annotations

import weakref

from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.config.urls import StoreUrl
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.memory import MemoryHub
from machinery_py.errors import ConfigError
from machinery_py.locks.memory import MemoryLock
from machinery_py.stores.family import Family, FamilyOptions
from machinery_py.stores.transactional import OneStore


class _Shared:
    """The stores behind one memory URL."""

    def __init__(self, options: FamilyOptions) -> None:
        self.options = options
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
            if shared is not None:
                _check(url, shared.options, options)
            else:
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


def _check(url: str, first: FamilyOptions, options: FamilyOptions) -> None:
    """Raise ConfigError if the store works by other options than this Server would have it."""
    for name, there, here in (
        ("lease", first.lease, options.lease),
        ("results_expire_in", first.expire_in, options.expire_in),
        ("clock", first.clock, options.clock),
    ):
        if there is not here and there != here:
            raise ConfigError(
                f"{url}: {name} is {there!r} in the Server that opened this store first, and {here!r} here "
                "(give both the same, or name another store)"
            )
