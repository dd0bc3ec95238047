"""Prometheus metrics of what the stores know: queues, dead letters and workers.

They are the same whoever asks, so one process exports them, not each worker: `machinery exporter`.
A program of its own registers a StoreCollector.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from machinery_py.contrib.prometheus import BoundedNames
from machinery_py.errors import MachineryError
from machinery_py.texts import get_logger

if TYPE_CHECKING:
    import datetime as dt

    from machinery_py.brokers.base import QueueStats, WorkerInfo
    from machinery_py.server import Server

logger = get_logger(__name__)

MAX_AGE = 5.0  # seconds that an answer of the store counts, for all that ask

QUEUES: Mapping[str, str] = {
    "waiting": "Messages that wait.",
    "running": "Messages that workers hold, running or prefetched.",
    "delayed": "Messages with an ETA to come.",
    "dead_letters": "Dead letters of the queue.",
    "oldest_seconds": "For how long the oldest waiting message has waited.",
    "paused": "1: nothing is taken from it.",
}
WORKERS: Mapping[str, str] = {
    "held": "Messages that it has claimed.",
    "beat_age_seconds": "Since its last beat, which renews its leases.",
}
Row = tuple[str, Sequence[float]]


class StoreCollector(Collector):
    """Asks the stores of a Server, at most once in MAX_AGE seconds. Any thread may call it.

    Attributes:
        is_up: whether the stores answered at the last look.
    """

    def __init__(self, server: Server, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._look_at = monotonic()
        self._found: list[GaugeMetricFamily] = []
        self.is_up: bool = True

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing: to be registered it need not ask the store."""
        return ()

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the metrics; without an answer `machinery_store_up 0` alone."""
        with self._lock:
            if self._monotonic() >= self._look_at:
                self._found = self._look()
                self._look_at = self._monotonic() + MAX_AGE
            return self._found

    def _look(self) -> list[GaugeMetricFamily]:
        up = GaugeMetricFamily("machinery_store_up", "1: the broker answers.", value=1.0)
        try:
            queues, workers = self._server.broker.stats(), self._server.broker.workers()
        except MachineryError as error:
            if self.is_up:
                logger.warning("metrics of the stores are missing: %s", error)
            self.is_up, up.samples[0] = False, up.samples[0]._replace(value=0.0)
            return [up]
        self.is_up = True
        alive = GaugeMetricFamily("machinery_workers", "Workers that beat.", labels=["state"])
        stalled = sum(one.stalled for one in workers)
        alive.add_metric(["alive"], len(workers) - stalled)
        alive.add_metric(["stalled"], stalled)
        now = self._server.now()
        return [
            up,
            alive,
            *_families("queue", QUEUES, [_of_queue(one, now) for one in queues]),
            *_families("worker", WORKERS, [_of_worker(one, now) for one in workers]),
        ]


def _of_queue(one: QueueStats, now: dt.datetime) -> Row:
    oldest = _age(one.oldest_at or now, now)
    return one.queue, (one.waiting, one.running, one.delayed, one.dead, oldest, one.paused)


def _of_worker(one: WorkerInfo, now: dt.datetime) -> Row:
    return one.name, (one.holding, _age(one.beat_at, now))


def _age(at: dt.datetime, now: dt.datetime) -> float:
    return max(0.0, (now - at).total_seconds())


def _families(
    what: str, metrics: Mapping[str, str], rows: Iterable[Row]
) -> Iterable[GaugeMetricFamily]:
    """Yield a metric for each column. Rows of one label are added up; of ages the oldest counts."""
    values: dict[str, list[float]] = {}
    label = BoundedNames()  # of this look: workers come and go
    for name, row in sorted(rows):
        before = values.setdefault(label(name), [0.0] * len(metrics))
        before[:] = [
            max(one, other) if metric.endswith("_seconds") else one + other
            for metric, one, other in zip(metrics, before, row, strict=True)
        ]
    for at, (metric, text) in enumerate(metrics.items()):
        family = GaugeMetricFamily(f"machinery_{what}_{metric}", text, labels=[what])
        for name, found in values.items():
            family.add_metric([name], found[at])
        yield family
