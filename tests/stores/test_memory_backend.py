"""The backend contract over MemoryBackend."""

from __future__ import annotations

import pytest

from machinery_py._drivers.memory import MemoryHub
from machinery_py.backends.memory import MemoryBackend
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend


class TestMemoryBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, clock: ManualClock) -> OpenBackend:
        backend = MemoryBackend(MemoryHub(clock), expire_in=self.expire_in)
        return lambda: backend
