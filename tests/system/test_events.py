"""Events of a fleet over each broker: off, switched on while it runs, and after an outage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py.brokers.topics import TOPIC_LENGTH
from machinery_py.control.records import EVENTS
from machinery_py.control.stream import EventStream
from machinery_py.errors import BrokerUnavailable
from machinery_py.events import TaskEvent, TaskSucceeded, WorkerOffline, WorkerOnline
from machinery_py.registry.task import Task
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.fixtures import OpenServer
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQServer, RedisServer, require


def until(stream: EventStream[Any], is_last: Callable[[Any], bool]) -> list[Any]:
    """Return the events up to the first one that is the last."""
    found: list[Any] = []
    wait_until(lambda: found.extend(stream.read(1.0)) or any(map(is_last, found)))
    return found


def is_end(event: Any) -> bool:
    return isinstance(event.event, TaskSucceeded)


class TestEvents:
    """Tests over each broker."""

    def test_fleet_is_watched_from_another_process_when_it_is_switched_on(
        self, open_server: OpenServer
    ) -> None:
        """L01, L16, L17, T39, T41, T42."""
        own, watching = open_server(), open_server()
        task = own.register_task("add", _add)
        with watching.events.stream(TaskEvent, WorkerOnline, WorkerOffline) as stream:
            with own.new_worker("ada", 1):
                assert task.send(1, 2).get(timeout=HANG) == 3
            assert stream.read(0.3) == []

            own.events.enable()
            with own.new_worker("ada", 1):
                uuid = task.send(20, 22).uuid
                found = until(stream, is_end)
            found += until(stream, lambda one: isinstance(one.event, WorkerOffline))
            assert stream.missed == 0

            later = open_server()
            later.events.enable()
            with later.new_worker("bob", 1, queues=["other"]):
                [online] = until(stream, lambda _: True)[:1]

        of_task = [one for one in found if isinstance(one.event, TaskEvent)]
        assert [one.kind for one in sorted(of_task, key=lambda one: one.stamp)] == [
            "TaskSent",
            "TaskReceived",
            "TaskStarted",
            "TaskSucceeded",
        ]
        assert {(one.uuid, one.name, one.queue) for one in of_task} == {
            (uuid, "add", "machinery_tasks")
        }
        assert [one.kind for one in found if one not in of_task] == [
            "WorkerOnline",
            "WorkerOffline",
        ]
        assert (online.worker, online.kind) == ("bob", "WorkerOnline")
        assert online.clock > max(one.clock for one in found)

    def test_stream_that_nobody_reads_is_bounded_and_tells_its_gap(
        self, open_server: OpenServer
    ) -> None:
        server = open_server()
        server.events.enable()
        task = server.register_task("add", _add)
        with server.events.stream() as stream:
            first = task.send(1, 2).uuid
            assert [one.uuid for one in until(stream, lambda _: True)] == [first]

            for _ in range(7):
                server.broker.broadcast(EVENTS, [b"{}"] * (TOPIC_LENGTH // 4), ttl=HANG)
            last = task.send(1, 2).uuid
            server.app.publisher.close()

            assert [one.uuid for one in until(stream, lambda _: True)] == [last]
            assert stream.missed > 0  # how many RabbitMQ had sent to it before, is its choice


def _add(a: int, b: int) -> int:
    return a + b


# Outages


def tell_until_seen(task: Task[..., Any], stream: EventStream[Any]) -> list[Any]:
    """Send tasks until the end of one of them is told."""
    found: list[Any] = []

    def is_seen() -> bool:
        assert task.send(1, 2).get(timeout=HANG) == 3
        found.extend(stream.read(0.2))
        return any(map(is_end, found))

    wait_until(is_seen)
    return found


def survives(
    open_server: OpenServer, break_off: Callable[[], None], mend: Callable[[], None]
) -> None:
    own, watching = open_server(), open_server()
    own.events.enable()
    task = own.register_task("add", _add)
    with watching.events.stream(TaskSucceeded) as stream, own.new_worker("ada", 1) as worker:
        tell_until_seen(task, stream)
        break_off()
        wait_until(lambda: not worker.ready)
        assert stream.read(0.2) == []
        with pytest.raises(BrokerUnavailable):
            watching.control.ping(timeout=HANG)
        mend()
        wait_until(lambda: worker.ready)
        tell_until_seen(task, stream)
        wait_until(lambda: "ada" in watching.control.ping(timeout=1.0))


class TestRedisRestart:
    @pytest.fixture
    def redis(self) -> Iterator[RedisServer]:
        require(RedisServer)
        with RedisServer() as redis:
            yield redis

    @pytest.fixture
    def broker_url(self, redis: RedisServer) -> str:
        return redis.url

    def test_events_and_orders_go_on_after_a_restart_of_the_server(
        self, open_server: OpenServer, redis: RedisServer
    ) -> None:
        survives(open_server, redis.kill, lambda: print(redis.start()))


class TestAMQPOutage:
    @pytest.fixture
    def proxy(self, rabbitmq_server: RabbitMQServer) -> Iterator[Proxy]:
        with Proxy(rabbitmq_server.start().port) as proxy:
            yield proxy

    @pytest.fixture
    def broker_url(self, proxy: Proxy, amqp_url: str) -> str:
        return proxy.through(amqp_url)

    def test_events_and_orders_go_on_after_an_outage(
        self, open_server: OpenServer, proxy: Proxy
    ) -> None:
        def break_off() -> None:
            proxy.refuse()
            proxy.reset()

        survives(open_server, break_off, proxy.heal)
