"""The contracts over a Redis Cluster of three masters, each with a replica."""

from __future__ import annotations

import pytest

from machinery_py.backends.redis.cluster import ClusterBackend
from machinery_py.brokers.base import Broker
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.redis.cluster import ClusterBroker
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.requests import command_at
from machinery_py.errors import BrokerUnavailable
from machinery_py.limits.redis import ClusterLimits
from machinery_py.locks.redis import ClusterLock
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Session, Store
from machinery_py.stores.outbox import TwoStores
from machinery_py.stores.redis import ClusterStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from machinery_py.testing.conformance.locks import LockConformance, OpenLock
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.stores.redis_cluster.case import ClusterClock, Clusters, clock, open_cluster
from tests.support.servers import RedisCluster as ClusterServers

__all__ = ["clock", "open_cluster"]


class ClusterTime:
    @pytest.fixture
    def clock(self, empty_cluster: ClusterServers) -> ClusterClock:
        return ClusterClock(empty_cluster)


class InCluster(ClusterTime):
    @pytest.fixture
    def open_store(self, open_cluster: Clusters, clock: ClusterClock) -> OpenStore:
        def open_store() -> Store:
            cluster = open_cluster()
            return ClusterStore(ClusterBroker(cluster), ClusterBackend(cluster), clock)

        return open_store


class InClusterBesideMemory(ClusterTime):
    @pytest.fixture
    def open_store(self, open_cluster: Clusters, clock: ClusterClock) -> OpenStore:
        broker = MemoryBroker(MemoryRows(clock))
        return lambda: TwoStores(broker, ClusterBackend(open_cluster()), clock)


class TestClusterBroker(ClusterTime, BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_cluster: Clusters) -> OpenBroker:
        return lambda: ClusterBroker(open_cluster())

    def count_from(self, broker: Broker, start: int, *queues: str) -> None:
        assert isinstance(broker, ClusterBroker)
        for queue in queues:
            for counter in "nc":
                key = f"{queue_keys(queue)[1]}{counter}".encode()
                request = command_at(b"SET", key, b"%d" % start)
                broker.cluster.ask([request], doing="testing", away=BrokerUnavailable)


class TestClusterBackend(ClusterTime, BackendConformance):
    @pytest.fixture
    def open_backend(self, open_cluster: Clusters) -> OpenBackend:
        return lambda: ClusterBackend(open_cluster(), expire_in=self.expire_in)


class TestClusterStore(InCluster, SettlementConformance):
    @pytest.mark.xfail(
        strict=True,
        reason="an outbox's message has the name of its bytes for ten minutes: a second retry to "
        "the same run, after a replay, is taken for a repeat and lost",
    )
    def test_fences_grow_whatever_becomes_of_a_task(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        super().test_fences_grow_whatever_becomes_of_a_task(store, session, clock)


class TestClusterSchedules(InCluster, ScheduleConformance):
    pass


class TestMemoryBrokerAndClusterBackend(InClusterBesideMemory, ScheduleConformance):
    pass


class TestClusterClaims(InCluster, ClaimConformance):
    pass


class TestClaimsInAClusterBesideAnotherBroker(InClusterBesideMemory, ClaimConformance):
    pass


class TestClusterLock(ClusterTime, LockConformance):
    @pytest.fixture
    def open_lock(self, open_cluster: Clusters) -> OpenLock:
        return lambda: ClusterLock(open_cluster())


class TestClusterLimits(ClusterTime, LimitsConformance):
    @pytest.fixture
    def open_limits(self, open_cluster: Clusters) -> OpenLimits:
        return lambda: ClusterLimits(open_cluster())
