"""State of a fleet as its events tell it: workers, running tasks, counts and rates.

Everything is bounded, whatever the events say: a stranger may send some. Ages are those of the
arrival here, because the clocks of hosts differ.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from machinery_py.events import (
    Event,
    TaskEvent,
    TaskFailed,
    TaskFenced,
    TaskRetried,
    TaskStarted,
    TaskSucceeded,
    TaskSuspended,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerOffline,
    WorkerOnline,
)

WINDOW = 60  # seconds that rates are counted over
MISSED_BEATS = 3  # intervals without a heartbeat until a worker counts as lost
INTERVAL = 5.0  # seconds; of a worker whose heartbeat is not there yet
FORGOTTEN = 600.0  # seconds of silence until a worker is not listed any more
MAX_NAMES = 1_000  # tasks and queues, each; more are counted together
MAX_WORKERS = 10_000
MAX_RUNNING = 10_000
SHOWN = 10  # of the slowest runs and the newest failures
OTHERS = "…"

_COUNTED = ("sent", "received", "succeeded", "failed", "retried", "revoked", "rejected")
_ENDS = (TaskSucceeded, TaskFailed, TaskRetried, TaskSuspended, TaskFenced)


@dataclass(slots=True)
class Tally:
    """Counts of the events of one task or queue.

    Attributes:
        runtime: seconds of all runs that succeeded.
        longest: seconds of the longest of them.
        ends: the last seconds in which runs ended, each with their number.
    """

    sent: int = 0
    received: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    revoked: int = 0
    rejected: int = 0
    runtime: float = 0.0
    longest: float = 0.0
    ends: deque[list[int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def mean(self) -> float:
        """Mean runtime in seconds."""
        return self.runtime / self.succeeded if self.succeeded else 0.0

    def add(self, event: TaskEvent, now: float) -> None:
        """Count an event."""
        name = type(event).__name__.removeprefix("Task").lower()
        if name in _COUNTED:
            setattr(self, name, getattr(self, name) + 1)
        if isinstance(event, TaskSucceeded):
            self.runtime += event.runtime
            self.longest = max(self.longest, event.runtime)
        if isinstance(event, _ENDS):
            if not self.ends or self.ends[-1][0] != int(now):
                self.ends.append([int(now), 0])
            self.ends[-1][1] += 1


@dataclass(slots=True)
class WorkerSeen:
    """A worker as its last event shows it.

    Attributes:
        seen_at: when that came, by the monotonic clock of this process.
        interval: seconds between its heartbeats.
        is_online: it has not told that it ended.
    """

    name: str
    host: str
    pid: int
    seen_at: float
    interval: float = INTERVAL
    is_online: bool = True
    active: int = 0
    processed: int = 0
    load: tuple[float, float, float] | None = None
    version: str = ""
    lost: int = 0


class FleetState:
    """Sum of the events so far. Belongs to one thread.

    Args:
        monotonic: the time, for tests.

    Attributes:
        workers: by name; those that ended or fell silent for FORGOTTEN seconds are removed.
        tasks, queues: a Tally for each name.
        running: UUID → the TaskStarted of each run that has not ended.
        failures: the newest final failures.
        slowest: the longest runs that succeeded, the longest first.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.since: float = monotonic()
        self.workers: dict[str, WorkerSeen] = {}
        self.tasks: dict[str, Tally] = {}
        self.queues: dict[str, Tally] = {}
        self.running: dict[str, TaskStarted] = {}
        self.failures: deque[TaskFailed] = deque(maxlen=SHOWN)
        self.slowest: list[TaskSucceeded] = []

    def apply(self, events: Iterable[Event]) -> None:
        """Take events in, in the order of the stream."""
        now = self._monotonic()
        self._forget(now)
        for event in events:
            if isinstance(event, TaskEvent):
                self._apply_task(event, now)
            elif isinstance(event, WorkerEvent):
                self._apply_worker(event, now)

    def alive(self) -> list[WorkerSeen]:
        """Return the workers that run now, by name."""
        now = self._monotonic()
        return [
            one
            for _, one in sorted(self.workers.items())
            if one.is_online and now - one.seen_at <= MISSED_BEATS * one.interval
        ]

    def rate(self, tally: Tally) -> float:
        """Return the runs that ended in a second, over the last WINDOW seconds or since then."""
        now = self._monotonic()
        ended = sum(count for second, count in tally.ends if second > now - WINDOW)
        return ended / max(1.0, min(float(WINDOW), now - self.since))

    def _apply_task(self, event: TaskEvent, now: float) -> None:
        for tallies, name in (self.tasks, event.name), (self.queues, event.queue):
            known = name if name in tallies or len(tallies) < MAX_NAMES else OTHERS
            tallies.setdefault(known, Tally()).add(event, now)
        if isinstance(event, TaskStarted):
            if len(self.running) < MAX_RUNNING:
                self.running[event.uuid] = event
        elif isinstance(event, _ENDS):
            begun = self.running.get(event.uuid)
            if begun is not None and begun.worker == event.worker:
                del self.running[event.uuid]
        if isinstance(event, TaskFailed):
            self.failures.append(event)
        elif isinstance(event, TaskSucceeded):
            slowest = sorted([*self.slowest, event], key=lambda one: -one.runtime)
            self.slowest = slowest[:SHOWN]

    def _apply_worker(self, event: WorkerEvent, now: float) -> None:
        known = self.workers.get(event.worker)
        if known is None:
            if len(self.workers) >= MAX_WORKERS:
                return
            known = WorkerSeen(event.worker, event.host, event.pid, now)
            self.workers[event.worker] = known
        known.host, known.pid, known.seen_at = event.host, event.pid, now
        known.is_online = not isinstance(event, WorkerOffline)
        if isinstance(event, (WorkerHeartbeat, WorkerOffline)):
            known.active, known.processed = event.active, event.processed
        if isinstance(event, WorkerHeartbeat):
            known.interval = event.interval or INTERVAL
            known.load, known.version, known.lost = event.load, event.version, event.lost
        if isinstance(event, (WorkerOnline, WorkerOffline)) or known.active == 0:
            self._end_runs(event.worker)  # their ends were lost on the way

    def _forget(self, now: float) -> None:
        for name in [name for name, one in self.workers.items() if now - one.seen_at > FORGOTTEN]:
            del self.workers[name]
            self._end_runs(name)

    def _end_runs(self, worker: str) -> None:
        for uuid in [uuid for uuid, run in self.running.items() if run.worker == worker]:
            del self.running[uuid]
