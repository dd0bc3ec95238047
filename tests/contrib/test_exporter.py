"""Metrics of the stores, as Prometheus gets them."""

from __future__ import annotations

import datetime as dt

from prometheus_client import CollectorRegistry, generate_latest

from machinery_py import Config, Server
from machinery_py.brokers.base import Message
from machinery_py.clock import UTC
from machinery_py.contrib.exporter import MAX_AGE, StoreCollector
from machinery_py.contrib.prometheus import MOST, OTHERS
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG
from tests.support.servers import RedisServer

Found = dict[tuple[str, str], float]


def read(registry: CollectorRegistry) -> Found:
    """Return metric and label → value."""
    return {
        (sample.name.removeprefix("machinery_"), "".join(sample.labels.values())): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def watched(server: Server) -> tuple[CollectorRegistry, ManualClock]:
    registry, clock = CollectorRegistry(), ManualClock(dt.datetime(2026, 1, 1, tzinfo=UTC))
    registry.register(StoreCollector(server, clock.monotonic))
    return registry, clock


def test_store_is_asked_once_in_five_seconds_and_its_absence_is_a_metric(
    empty_redis: RedisServer,
) -> None:
    server = Server(Config(broker=empty_redis.url, publish_timeout=0.5))
    registry, clock = watched(server)
    server.task(len).send([])

    found = read(registry)
    assert found["store_up", ""] == 1
    assert found["queue_waiting", "machinery_tasks"] == 1
    assert found["queue_paused", "machinery_tasks"] == 0
    assert found["workers", "alive"] == 0

    empty_redis.stop()
    assert read(registry) == found
    clock.advance(MAX_AGE)
    assert read(registry) == {("store_up", ""): 0}

    empty_redis.start()
    clock.advance(MAX_AGE)
    assert read(registry)["store_up", ""] == 1
    server.close()


def test_labels_are_bounded_and_those_of_one_name_are_one() -> None:
    server = Server(Config(broker="memory://"))
    messages = [
        Message(uuid=f"u{number}", name="a", queue=f"q{number:04}", body=b"")
        for number in range(MOST + 2)
    ]
    server.broker.put(messages, token="")

    with server.new_worker("web", 1, queues=["a"]), server.new_worker("web", 1, queues=["b"]):
        registry, _ = watched(server)
        text = generate_latest(registry).decode()
        found = read(registry)

    assert found["workers", "alive"] == 2
    assert text.count("machinery_worker_held{") == 1
    assert 0 <= found["worker_beat_age_seconds", "web"] < HANG
    waiting = {label: value for (name, label), value in found.items() if name == "queue_waiting"}
    assert sum(waiting.values()) == MOST + 2
    assert len(waiting) == MOST + 1
    assert waiting["q0000"] == 1
    assert waiting[OTHERS] > 0
