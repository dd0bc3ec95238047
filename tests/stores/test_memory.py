"""The settlement contract over the memory store."""

from __future__ import annotations

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.connections.memory import MemoryHub
from machinery_py.stores.transactional import OneStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance


class TestMemoryStore(SettlementConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        hub = MemoryHub(clock)
        store = OneStore(MemoryBroker(hub), MemoryBackend(hub), hub.transaction)
        return lambda: store
