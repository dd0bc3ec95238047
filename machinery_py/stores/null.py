"""`null`: a result backend that keeps nothing."""

from __future__ import annotations

from machinery_py.backends.null import NullBackend
from machinery_py.stores.family import Family


class NullFamily(Family):
    """A backend for fire and forget."""

    def backend(self) -> NullBackend:
        return NullBackend(self.options.clock)
