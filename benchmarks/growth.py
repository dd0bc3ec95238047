"""`python -m benchmarks growth`: what a task costs as a fleet grows. It should cost the same.

    backlog   so many tasks wait behind those that are run
    queues    so many queues exist, each with a task; tasks are sent to them in turn
    served    a worker serves so many queues, and its tasks are spread over them
    workers   so many workers are registered and beat; one of them runs the tasks
    threads   so many threads of one process send
    suspended so many tasks wait for a signal

All servers of an axis run at once, and are measured in turns. Costs are CPU time: of the sending
process, of the worker process, and of Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from redis import Redis

from benchmarks.__main__ import Steps
from benchmarks.children import REDIS_CONFIG
from benchmarks.peers.report import amount, machine
from benchmarks.workers import go, helper, said
from benchmarks.workload import BULK, Figures, make_server
from tests.support.servers import RedisServer

SENDS, RUNS = 2_000, 10_000  # tasks sent one by one and run, in each round at each point
QUICK_SENDS, QUICK_RUNS = 50, 200
FLAT = 1.3  # the most that a task may cost, as a part of the cost at the first point
QUEUE = "machinery_tasks"

FIGURES: Mapping[str, str] = {
    "send": "send, sender",
    "send redis": "send, Redis",
    "run": "run, worker",
    "run redis": "run, Redis",
}


class Stage:
    """A private Redis, and a server that sends to it, at one point of an axis."""

    def __init__(self, stack: contextlib.ExitStack, *, sends: int, runs: int) -> None:
        redis = stack.enter_context(RedisServer(appendonly=True, config=REDIS_CONFIG))
        self.url = redis.url
        self.redis = stack.enter_context(Redis.from_url(redis.url))
        self.server: Any = make_server(redis.url)
        stack.callback(self.server.close)
        self.task = self.server.get_registered_task("noop")
        self.sends, self.runs = sends, runs
        self.threads = 1
        self.backlog = 0
        self.queues: Sequence[str] = (QUEUE,)  # that tasks are sent to, in turn
        self.served: Sequence[str] = (QUEUE,)
        self.sessions: list[Any] = []

    def measure(self) -> Figures:
        figures = self._send()
        self.fill(self.served, self.backlog + self.runs - self._waiting())
        return figures | self._run()

    def fill(self, queues: Sequence[str], count: int, task: Any = None) -> None:
        """Send so many tasks in large steps, spread over the queues."""
        from machinery_py import group

        tasks = [(task or self.task).options(queue=queue) for queue in queues]
        for start in range(0, count, BULK):
            numbers = range(start, min(count, start + BULK))
            group(tasks[number % len(tasks)].signature(number) for number in numbers).send()

    def _send(self) -> Figures:
        tasks = [self.task.options(queue=queue) for queue in self.queues]
        each = self.sends // self.threads

        def send(_thread: int) -> None:
            for number in range(each):
                tasks[number % len(tasks)].send(number)

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(send, range(self.threads)))  # connections, caches
            redis, own = self._redis_cpu(), time.process_time()
            list(pool.map(send, range(self.threads)))
            own, redis = time.process_time() - own, self._redis_cpu() - redis
        return {
            "send": 1e6 * own / (each * self.threads),
            "send redis": 1e6 * redis / (each * self.threads),
        }

    def _run(self) -> Figures:
        os.environ["MACHINERY_QUEUES"] = ",".join(self.served)  # for the worker's process
        with helper("helper_alone", self.url, self.runs) as worker:
            for session in self.sessions:  # fresh enough until this is over
                session.beat()
            waiting, redis = self._waiting(), self._redis_cpu()
            go(worker)
            run = json.loads(said(worker))
            redis, done = self._redis_cpu() - redis, waiting - self._waiting()
        del os.environ["MACHINERY_QUEUES"]
        return {"run": 1e6 * run["cpu"] / run["processed"], "run redis": 1e6 * redis / done}

    def _waiting(self) -> int:
        with self.redis.pipeline(transaction=False) as pipe:
            for queue in self.served:
                pipe.llen(queue)
            return sum(pipe.execute())

    def _redis_cpu(self) -> float:
        facts = self.redis.info("cpu")
        return float(facts["used_cpu_sys"] + facts["used_cpu_user"])


def backlog(stage: Stage, point: int) -> None:
    stage.fill(stage.served, point)
    stage.backlog = point


def queues(stage: Stage, point: int) -> None:
    stage.queues = [f"q{number}" for number in range(point)]
    stage.fill(stage.queues, point)


def served(stage: Stage, point: int) -> None:
    stage.queues = stage.served = [f"q{number}" for number in range(point)]


def workers(stage: Stage, point: int) -> None:
    broker = stage.server.broker
    stage.sessions = [broker.consume([QUEUE], worker=f"w{one}") for one in range(point - 1)]


def threads(stage: Stage, point: int) -> None:
    stage.threads = point


def suspended(stage: Stage, point: int) -> None:
    stage.fill(stage.served, point, stage.server.get_registered_task("waits"))
    with stage.server.new_worker(concurrency=4):
        while any(one.waiting + one.running for one in stage.server.inspect.queues()):
            time.sleep(0.5)


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows: a function that brings a stage to a point, and the points."""

    prepare: Callable[[Stage, int], None]
    points: Sequence[int]
    quick: Sequence[int]
    figures: Sequence[str] = tuple(FIGURES)

    @property
    def name(self) -> str:
        return self.prepare.__name__


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(backlog, (1_000, 100_000, 1_000_000), (100, 500)),
        Axis(queues, (10, 1_000, 10_000), (2, 20)),
        Axis(served, (1, 10, 100, 1_000), (1, 3)),
        Axis(workers, (1, 10, 100, 1_000), (1, 5)),
        Axis(threads, (1, 10, 100), (1, 4), ("send", "send redis")),
        Axis(suspended, (100, 10_000, 100_000), (2, 20)),
    )
}
Found = dict[int, list[Figures]]  # by point: the figures of each round


def measure(axis: Axis, *, rounds: int, quick: bool, begin: Callable[[str], None]) -> Found:
    found: Found = {}
    sizes = {"sends": QUICK_SENDS, "runs": QUICK_RUNS} if quick else {"sends": SENDS, "runs": RUNS}
    with contextlib.ExitStack() as stack:
        stages: dict[int, Stage] = {}
        for point in axis.quick if quick else axis.points:
            begin(f"{axis.name} {point:,}: prepare")
            stages[point] = Stage(stack, **sizes)
            axis.prepare(stages[point], point)
        for number in range(rounds):
            # The first of a round has the colder caches.
            for point in stages if number % 2 == 0 else reversed(stages):
                begin(f"round {number + 1}: {axis.name} {point:,}")
                found.setdefault(point, []).append(stages[point].measure())
    return found


def rows(axis: Axis, found: Found) -> Iterator[str]:
    """Lines of Markdown: medians by point, and the growth from the first to each, in each round."""
    points = sorted(found)
    head = " | ".join(f"{one:,}" for one in points)
    yield f"| {axis.name}: µs of CPU a task | {head} | grows by |"
    yield f"|---|{'---:|' * (len(points) + 1)}"
    for name in axis.figures:
        medians = [statistics.median(one[name] for one in found[point]) for point in points]
        growth = max((growths(found, name, point) for point in points[1:]), key=statistics.median)
        median = statistics.median(growth)
        yield (
            f"| {FIGURES[name]} | {' | '.join(map(amount, medians))} | "
            f"{median:.2f} ({min(growth):.2f} to {max(growth):.2f})"
            f"{'' if median <= FLAT else ' **not flat**'} |"
        )


def growths(found: Found, figure: str, point: int) -> list[float]:
    first = found[min(found)]
    return [here[figure] / there[figure] for here, there in zip(found[point], first, strict=True)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks growth",
        description="Measures what a task costs as a fleet grows, on private Redis servers.",
    )
    parser.add_argument("--only", nargs="+", default=list(AXES), choices=list(AXES), metavar="AXIS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="shows that everything works, not how fast"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    axes = [AXES[name] for name in options.only]
    rounds = min(options.rounds, 2) if options.quick else options.rounds
    total = sum(len(axis.quick if options.quick else axis.points) for axis in axes) * (rounds + 1)
    steps = Steps(total, sys.stderr)
    if not options.json:
        print(f"{machine()}, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    results: dict[str, Found] = {}
    for axis in axes:
        results[axis.name] = measure(axis, rounds=rounds, quick=options.quick, begin=steps.begin)
        if not options.json:
            print("", *rows(axis, results[axis.name]), sep="\n", flush=True)
    steps.end()
    if options.json:
        print(json.dumps(results, indent=2))
    return 0
