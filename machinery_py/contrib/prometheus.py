"""Prometheus metrics of the tasks that this process sends and runs: `install(server)`.

They are counted by handlers of events, in the thread where these happen. Without `install` no
handler is there, and no event is made. docs/reference/metrics.md lists the metrics.

Label values are bounded: a name that is not plain text, or is one too many, is counted under "…".
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError as _error:
    raise ImportError(
        "machinery_py.contrib.prometheus needs prometheus-client: "
        "pip install 'machinery_py[metrics]'"
    ) from _error

from machinery_py.events import (
    ConnectionLost,
    Event,
    MessageDead,
    TaskEvent,
    TaskFailed,
    TaskFenced,
    TaskReceived,
    TaskRejected,
    TaskRetried,
    TaskSent,
    TaskSucceeded,
    TaskSuspended,
    WorkerHeartbeat,
    WorkerOffline,
)
from machinery_py.registry.outcomes import REVOKED

if TYPE_CHECKING:
    from machinery_py.server import Server

MOST = 1_000  # label values of one kind
LONGEST = 200  # characters of one
OTHERS = "…"
# Seconds, from a call of some milliseconds to a batch of hours.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200)


class BoundedNames:
    """The first MOST names that are short and printable; of others it returns OTHERS."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= MOST or len(name) > LONGEST or not name.isprintable():
            return OTHERS
        self._known.add(name)
        return name


class TaskMetrics:
    """Counters and histograms of tasks in one registry.

    Attributes:
        handlers: of the events that are counted.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"machinery_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str) -> Histogram:
            labels = ("name", "queue")
            return Histogram(f"machinery_{name}", what, labels, registry=registry, buckets=BUCKETS)

        self._sent = counter("tasks_sent", "Tasks that were published.", "name", "queue")
        self._ended = counter("tasks_ended", "Tries that ended.", "name", "queue", "outcome")
        self._rejected = counter(
            "tasks_rejected", "Deliveries that were not run.", "name", "queue", "reason"
        )
        self._waits = histogram("task_wait_seconds", "From sending, or the ETA, to the receipt.")
        self._runs = histogram("task_run_seconds", "In the function.")
        self._dead = counter(
            "dead_letters", "Messages that became dead letters.", "queue", "reason"
        )
        self._connections = counter("connections_lost", "Outages of the broker, seen by workers.")
        self._events = counter("events_lost", "Events that did not reach the stream.")
        self._lost: dict[tuple[str, str, int], int] = {}  # process → its count at the last beat
        self._name, self._queue, self._reason = BoundedNames(), BoundedNames(), BoundedNames()
        self._pairs: set[tuple[str, str]] = set()
        self._series: dict[tuple[Any, ...], Any] = {}  # metric and labels → its counter; is faster
        self.handlers: Mapping[type[Event], Callable[[Any], object]] = {
            TaskSent: lambda event: self._of(self._sent, event).inc(),
            TaskReceived: self._on_received,
            TaskSucceeded: lambda event: self._end(event, "succeeded", event.runtime),
            TaskRetried: lambda event: self._end(event, "retried", event.runtime),
            TaskSuspended: lambda event: self._end(event, "suspended", event.runtime),
            TaskFailed: self._on_failed,
            TaskFenced: lambda event: self._end(event, "fenced", 0.0),
            TaskRejected: self._on_rejected,
            MessageDead: self._on_dead,
            ConnectionLost: self._on_lost,
            WorkerHeartbeat: self._on_heartbeat,
            WorkerOffline: lambda event: self._lost.pop(_process(event), None),
        }

    def count(self, event: Event) -> None:
        """Count an event of another process."""
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _of(self, metric: Any, event: TaskEvent, *more: str) -> Any:
        """Return the series of this metric for the task."""
        signature = event.signature
        key = (metric, signature.name, signature.routing_key, *more)
        found = self._series.get(key)
        if found is None:
            labels = self._labels(signature.name, signature.routing_key)
            found = metric.labels(*labels, *more)
            if OTHERS not in labels:
                self._series[key] = found
        return found

    def _labels(self, name: str, queue: str) -> tuple[str, str]:
        pair = self._name(name), self._queue(queue)
        if pair not in self._pairs:
            if len(self._pairs) >= MOST:
                return pair[0], OTHERS
            self._pairs.add(pair)
        return pair

    def _on_received(self, event: TaskReceived) -> None:
        if event.wait is not None:
            self._of(self._waits, event).observe(event.wait)

    def _end(self, event: TaskEvent, outcome: str, runtime: float) -> None:
        self._of(self._ended, event, outcome).inc()
        if runtime:  # else it did not run
            self._of(self._runs, event).observe(runtime)

    def _on_failed(self, event: TaskFailed) -> None:
        is_revoked = event.error_type == REVOKED.error_type
        self._end(event, "revoked" if is_revoked else "failed", event.runtime)

    def _on_rejected(self, event: TaskRejected) -> None:
        self._of(self._rejected, event, self._reason(event.reason)).inc()

    def _on_dead(self, event: MessageDead) -> None:
        self._dead.labels(self._queue(event.queue), self._reason(event.reason)).inc()

    def _on_lost(self, event: ConnectionLost) -> None:
        if event.attempt == 0:
            self._connections.inc()

    def _on_heartbeat(self, event: WorkerHeartbeat) -> None:
        process = _process(event)
        if process in self._lost or len(self._lost) < MOST:
            self._events.inc(max(0, event.lost - self._lost.get(process, 0)))
            self._lost[process] = event.lost


def _process(event: Event) -> tuple[str, str, int]:
    return event.worker, event.host, event.pid


class _ProcessMetrics:
    """Metrics of this process in one registry, for all its Servers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._slots, self._running = (
            Gauge(f"machinery_worker_{name}", what, registry=registry, multiprocess_mode="livesum")
            for name, what in (("slots", "Tasks at a time."), ("running", "Tasks that run."))
        )
        self._tasks = TaskMetrics(registry)
        self._servers: weakref.WeakSet[Server] = weakref.WeakSet()

    def follow(self, server: Server) -> None:
        if server not in self._servers:
            self._servers.add(server)
            for kind, handler in self._tasks.handlers.items():
                server.events.subscribe(kind, handler)
            server.events.subscribe(WorkerHeartbeat, self._on_heartbeat)

    def _on_heartbeat(self, event: WorkerHeartbeat) -> None:
        self._slots.set(event.slots)
        self._running.set(event.active)


_metrics_of = functools.cache(_ProcessMetrics)


def install(server: Server, registry: CollectorRegistry = REGISTRY) -> None:
    """Count what this process sends and runs, from now on. May be called twice.

    `machinery worker --health-port` does it in all its processes. In others, as a web process, the
    program has to show the registry.
    """
    _metrics_of(registry).follow(server)
