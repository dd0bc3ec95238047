"""Measurements of much at once, on Redis: a chord of 100,000, and 100,000 tasks due in one second.

Like those of measure.py they run in the child.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from redis import Redis

from benchmarks.workers import idle_worker
from benchmarks.workload import WAIT, Figures, Wrong, fill, make_server

NOTED = 100  # µs from which on Redis notes a call
QUEUE, DELAYED = (
    "machinery_tasks",
    "delayed_tasks",
)  # as docs/explanation/redis-protocol.md has them
STEPS = 20  # moments of the second in which the tasks are due
LOOK = 0.02  # seconds between two looks at the queues


@contextlib.contextmanager
def calls_noted(redis: Redis) -> Iterator[list[float]]:
    """Return a list that has the milliseconds of the longest call since, when this has ended."""
    longest: list[float] = []
    redis.config_set("slowlog-log-slower-than", NOTED)
    redis.config_set("slowlog-max-len", 100_000)
    redis.slowlog_reset()
    yield longest
    taken = [entry["duration"] for entry in redis.slowlog_get(100_000)]
    longest.append(max(taken, default=NOTED) / 1000)


def huge_chord(url: str, count: int) -> Figures:
    from machinery_py import chord, group

    server = make_server(url)
    task = server.get_registered_task("noop")
    total = server.get_registered_task("total").partial()
    with Redis.from_url(url) as redis, idle_worker(server, url), calls_noted(redis) as longest:
        members = group(task.signature(number) for number in range(count))
        began = time.perf_counter()
        found = server.send(chord(members, total, collect=True)).get(timeout=WAIT)
        seconds = time.perf_counter() - began
    if found != sum(range(count)):
        raise Wrong(f"the result is {found}, not {sum(range(count))}")
    return {"huge chord": seconds, "longest script": longest[0]}


class Fresh:
    """Sender of one task after the other to a busy queue; each waits for its result."""

    def __init__(self, task: Any) -> None:
        self.taken: list[float] = []
        self._task = task
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fresh")

    def __enter__(self) -> Fresh:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            self._task.send(-1).get(timeout=WAIT)
            self.taken.append(time.perf_counter() - began)


def burst(url: str, count: int) -> Figures:
    """Let so many tasks be due within one second, in twenty steps, before one idle worker."""
    server = make_server(url)
    task = server.get_registered_task("noop")
    with Redis.from_url(url) as redis, idle_worker(server, url):
        due_at = server.now() + timedelta(seconds=3.0 + count / 5000)
        for step in range(STEPS):
            eta = due_at + timedelta(seconds=step / STEPS)
            fill(server, (step + 1) * count // STEPS - step * count // STEPS, eta=eta)
        left = (due_at - server.now()).total_seconds()
        # Not by `stats`, which moves what is due itself.
        if left <= 0 or redis.zcard(DELAYED) != count:
            raise Wrong(f"{redis.zcard(DELAYED)} tasks wait {left:.1f} s before they are due")
        time.sleep(left)
        began = time.perf_counter()
        with Fresh(task) as fresh:
            # One of the waiting may be a fresh one.
            while redis.zcard(DELAYED) + redis.llen(QUEUE) > 1:
                if time.perf_counter() - began > WAIT:
                    raise Wrong(f"{redis.zcard(DELAYED):,} tasks are delayed still")
                time.sleep(LOOK)
            seconds = time.perf_counter() - began
    return {
        "burst": seconds,
        "fresh": statistics.median(fresh.taken),
        "fresh most": max(fresh.taken),
    }
