"""The settlement contract over the memory store."""

from __future__ import annotations

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.rows import RowsStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance


class TestMemoryStore(SettlementConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        hub = MemoryRows(clock)
        store = RowsStore(MemoryBroker(hub), MemoryBackend(hub))
        return lambda: store
