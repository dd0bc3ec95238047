"""What `install` counts, and the page that lists it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from machinery_py import Config, RetryTaskLater, Server, Signature
from machinery_py.brokers.base import Message
from machinery_py.contrib.prometheus import LONGEST, MOST, OTHERS, install
from machinery_py.events import ConnectionLost, TaskRejected, TaskSent, WorkerHeartbeat

HOSTILE = (
    "x" * (LONGEST + 1),
    "two\nlines",
    'machinery_tasks_sent_total{name="\u202e"} 7',
    "half \ud800 a pair",
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def server() -> Server:
    return Server(Config(broker="memory://", result_backend="memory://"))


def value(registry: CollectorRegistry, metric: str, /, **labels: str) -> float | None:
    return registry.get_sample_value(f"machinery_{metric}", labels)


def ends(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Return outcome → number of ends of this task."""
    return {
        sample.labels["outcome"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "machinery_tasks_ended_total" and sample.labels["name"] == name
    }


def sent(name: str, queue: str = "q") -> TaskSent:
    return TaskSent(signature=Signature(name=name, routing_key=queue))


def test_each_end_of_a_try_is_counted_once_by_its_outcome(
    server: Server, registry: CollectorRegistry
) -> None:
    install(server, registry)
    tries: list[int] = []

    @server.task
    def add(x: int, y: int) -> int:
        return x + y

    @server.task
    def boom() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RetryTaskLater("again", delay=0.0)
        raise ValueError

    @server.task(queue="mail")
    def late() -> None:
        raise RetryTaskLater("later", delay=3600)

    add.send(1, 2)
    add.send(3, 4)
    boom.send()
    late.send()
    server.revoke([add.send(5, 6).uuid])
    body = b"no message"
    server.broker.put([Message(uuid="", name="", queue="mail", body=body)], token="")
    server.new_worker("w", 1, queues=["machinery_tasks", "mail"], burst=True).launch(signals=False)

    assert ends(registry, "add") == {"succeeded": 2, "revoked": 1}
    assert ends(registry, "boom") == {"retried": 1, "failed": 1}
    assert ends(registry, "late") == {"retried": 1}
    queue = {"queue": "machinery_tasks"}
    assert value(registry, "tasks_sent_total", name="add", **queue) == 3
    assert value(registry, "task_wait_seconds_count", name="add", **queue) == 2
    assert value(registry, "task_run_seconds_count", name="add", **queue) == 2
    assert value(registry, "task_run_seconds_count", name="boom", **queue) == 2
    assert value(registry, "dead_letters_total", queue="mail", reason="undecodable") == 1


def test_names_that_are_hostile_or_too_many_are_counted_together(
    server: Server, registry: CollectorRegistry
) -> None:
    install(server, registry)
    names = [f"task_{number}" for number in range(MOST + 10)]

    for name in (*HOSTILE, *names, *names):
        event = sent(name, queue=name)
        server.events.emit(event)
        server.events.emit(TaskRejected(signature=event.signature, reason=name))

    counts = {
        (sample.labels["name"], sample.labels["queue"]): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name == "machinery_tasks_sent_total"
    }
    assert len(counts) == MOST + 1
    assert counts[OTHERS, OTHERS] == len(HOSTILE) + 20
    assert counts["task_0", "task_0"] == 2
    reason = {"name": OTHERS, "queue": OTHERS, "reason": OTHERS}
    assert value(registry, "tasks_rejected_total", **reason) == counts[OTHERS, OTHERS]


def test_installed_twice_it_counts_once_and_a_second_server_counts_with_it(
    server: Server, registry: CollectorRegistry
) -> None:
    other = Server(Config(broker="memory://"))
    for one in (server, server, other):
        install(one, registry)

    server.events.emit(sent("a"))
    other.events.emit(sent("a"))

    assert value(registry, "tasks_sent_total", name="a", queue="q") == 2


def test_a_process_that_does_not_install_makes_no_event(server: Server) -> None:
    assert server.events.wanted == frozenset()


def test_facts_of_a_worker_are_those_of_its_last_heartbeat(
    server: Server, registry: CollectorRegistry
) -> None:
    """`events_lost` is a sum: over heartbeats of the processes, each of which tells its own sum."""
    install(server, registry)

    for active, lost in ((3, 0), (1, 5), (2, 7)):
        server.events.emit(WorkerHeartbeat(worker="a", slots=4, active=active, lost=lost))
    server.events.emit(WorkerHeartbeat(worker="b", slots=8, active=0, lost=1))
    server.events.emit(ConnectionLost(worker="a", error="", attempt=0, limit=0, delay=1.0))
    server.events.emit(ConnectionLost(worker="a", error="", attempt=1, limit=0, delay=1.0))

    assert value(registry, "worker_slots") == 8
    assert value(registry, "worker_running") == 0
    assert value(registry, "events_lost_total") == 8
    assert value(registry, "connections_lost_total") == 1
