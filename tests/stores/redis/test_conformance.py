"""The contracts over one Redis. A consumer dies by missing its beats, at two looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from machinery_py.backends.base import Change
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.brokers.base import Broker
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis import keys as redis_keys
from machinery_py.limits.redis import RedisLimits
from machinery_py.locks.redis import RedisLock
from machinery_py.stores.base import Store
from machinery_py.stores.redis import RedisStore
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.checkpoints import CheckpointConformance
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.groups import listed
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from machinery_py.testing.conformance.locks import LockConformance, OpenLock
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from machinery_py.wire.states import encode_group
from machinery_py.worker.loops.go_groups import GoGroupPoller
from tests.stores.left_behind import GROUP, SOON, LeftBehind, arrival, ended, look_until_idle
from tests.stores.redis.case import Drivers, ServerClock, clock, open_driver

__all__ = ["clock", "open_driver"]


class RedisTime:
    @pytest.fixture
    def clock(self, redis_url: str) -> Iterator[ServerClock]:
        with closing(ServerClock(redis_url)) as clock:
            yield clock


class InRedis(RedisTime):
    @pytest.fixture
    def open_store(self, open_driver: Drivers) -> OpenStore:
        def open_store() -> Store:
            driver = open_driver()
            return RedisStore(RedisBroker(driver), RedisBackend(driver))

        return open_store


class TestRedisBroker(RedisTime, BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_driver: Drivers) -> OpenBroker:
        return lambda: RedisBroker(open_driver())

    def count_from(self, broker: Broker, start: int, *queues: str) -> None:
        assert isinstance(broker, RedisBroker)
        for queue in queues:
            for counter in "nc":
                key = f"{redis_keys.queue_keys(queue)[1]}{counter}".encode()
                broker.driver.ask(b"SET", key, b"%d" % start, doing="testing")


class TestRedisBackend(RedisTime, BackendConformance):
    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: RedisBackend(open_driver(), expire_in=self.expire_in)

    def test_tasks_of_a_rare_name_are_looked_for_by_the_server(self, backend: RedisBackend) -> None:
        def sent() -> int:
            info = backend.driver.ask(b"INFO", b"stats", doing="testing").decode()
            total, replicas = (
                int(info.partition(f"total_net_{what}output_bytes:")[2].split()[0])
                for what in ("", "repl_")
            )
            return total - replicas

        for name, uuids in (("rare", range(1)), ("often", range(1, 10_001))):
            states = [
                TaskState(task_uuid=f"task_{uuid}", task_name=name, state=State.SUCCESS)
                for uuid in uuids
            ]
            backend.apply([Change(key=name, states=states)])
        before = sent()

        found = listed(backend, name="rare")

        assert [state.task_uuid for state in found] == ["task_0"]
        assert sent() - before < 100_000  # bytes: all that are looked at are more than a million


class TestRedisStore(InRedis, SettlementConformance):
    pass


class TestRedisSchedules(InRedis, ScheduleConformance):
    pass


class TestRedisClaims(InRedis, ClaimConformance):
    pass


class TestRedisCheckpoints(InRedis, CheckpointConformance):
    pass


class TestRedisLock(RedisTime, LockConformance):
    @pytest.fixture
    def open_lock(self, open_driver: Drivers) -> OpenLock:
        return lambda: RedisLock(open_driver())


class TestRedisLimits(RedisTime, LimitsConformance):
    @pytest.fixture
    def open_limits(self, open_driver: Drivers) -> OpenLimits:
        return lambda: RedisLimits(open_driver())


class TestChordsThatAreLeftBehindInRedis(RedisTime, LeftBehind):
    @pytest.fixture
    def open_backend(self, open_driver: Drivers) -> OpenBackend:
        return lambda: RedisBackend(open_driver())

    def test_a_chord_that_go_has_settled_is_dropped(
        self, backend: RedisBackend, clock: ServerClock
    ) -> None:
        backend.apply([ended("task_2")])
        settled = encode_group(msgspec.structs.replace(GROUP, chord_triggered=True))
        backend.driver.ask(b"SET", b"group_1", settled, doing="testing")
        clock.advance(SOON)
        poller = GoGroupPoller(backend)

        poller.adopt()
        look_until_idle(poller)

        assert backend.ready_groups(9) == []
        clock.advance(1000.0)
        assert backend.partial_groups(9) == []

    def test_a_ready_chord_that_go_has_settled_is_ready_no_more(
        self, backend: RedisBackend, clock: ServerClock
    ) -> None:
        backend.apply([ended("task_2", arrival("task_2"))])
        backend.driver.ask(b"SET", redis_keys.GO_MUTEX, b"go", doing="testing")
        assert backend.trigger_chord("group_1") is False
        assert [one.group_uuid for one in backend.ready_groups(9)] == ["group_1"]  # Go may die yet

        settled = encode_group(msgspec.structs.replace(GROUP, chord_triggered=True))
        backend.driver.ask(b"SET", b"group_1", settled, doing="testing")
        backend.driver.ask(b"DEL", redis_keys.GO_MUTEX, doing="testing")

        assert backend.trigger_chord("group_1") is False
        assert backend.ready_groups(9) == []
        clock.advance(backend.expire_in + 1.0)
        keys = b"mpy:g:{group_1}", b"mpy:h:{group_1}"
        assert backend.driver.ask(b"EXISTS", *keys, doing="testing") == 0
