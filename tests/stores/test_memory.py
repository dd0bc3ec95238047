"""The contracts over the memory store, and what Servers that share one agree on."""

from __future__ import annotations

import pytest

from machinery_py import Config, Server
from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.errors import ConfigError
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.memory import MemoryLock
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.rows import RowsStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.checkpoints import CheckpointConformance
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from machinery_py.testing.conformance.locks import LockConformance, OpenLock
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance


class TestMemoryBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, clock: ManualClock) -> OpenBroker:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: broker


class TestMemoryBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, clock: ManualClock) -> OpenBackend:
        backend = MemoryBackend(MemoryRows(clock), expire_in=self.expire_in)
        return lambda: backend


class InMemory:
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        hub = MemoryRows(clock)
        store = RowsStore(MemoryBroker(hub), MemoryBackend(hub))
        return lambda: store


class TestMemoryStore(InMemory, SettlementConformance):
    pass


class TestMemorySchedules(InMemory, ScheduleConformance):
    pass


class TestMemoryClaims(InMemory, ClaimConformance):
    pass


class TestMemoryCheckpoints(InMemory, CheckpointConformance):
    pass


class TestMemoryLock(LockConformance):
    @pytest.fixture
    def open_lock(self, clock: ManualClock) -> OpenLock:
        lock = MemoryLock(MemoryRows(clock))
        return lambda: lock


class TestMemoryLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, clock: ManualClock) -> OpenLimits:
        limits = RowsLimits(MemoryRows(clock))
        return lambda: limits


def test_servers_of_one_name_agree_on_how_their_store_works() -> None:
    first = Server(Config(broker="memory://agreed", lease=5.0))
    assert first.backend is Server(first.config).backend
    for other, word in (
        (
            Server(Config(broker="memory://agreed")),
            "lease is 5.0 in the Server that opened this store first, and 10.0 here",
        ),
        (
            Server(Config(broker="memory://agreed", lease=5.0, results_expire_in=60)),
            "results_expire_in is 3600.0 .* 60.0 here",
        ),
        (Server(first.config, clock=ManualClock()), "clock is .*SystemClock"),
    ):
        with pytest.raises(ConfigError, match=f"memory://agreed: {word}"):
            _ = other.backend
    first.close()
