"""The measurements, each in a fresh process that prints a line of JSON.

    python -m benchmarks.measure NAME URL COUNT

On a store that processes share, the measured worker has a process of its own, started from here. On
memory:// it runs in this process, beside the sender.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks import raw_mongo
from benchmarks.large import burst, huge_chord
from benchmarks.limits import helper_limited, limited
from benchmarks.raw_sqlite import RawSender, drain_raw
from benchmarks.workers import (
    THREADS,
    helper_alone,
    helper_drain,
    helper_logged,
    helper_metrics,
    helper_serve,
    idle_worker,
    work_off_by,
)
from benchmarks.workload import (
    BULK,
    WAIT,
    Figures,
    Wrong,
    beside,
    check_all_succeeded,
    check_queues_empty,
    cpu,
    fill,
    is_mongodb,
    is_sqlite,
    make_server,
    parts,
)

TURNS = 3  # of a drain with events and one without
BLOCKS = 20  # turns in which sends of the library and bare ones alternate


IMPORTS = {  # what a fresh Python runs, by figure
    "python": "",
    "import": "import machinery_py",
    "import Server": "from machinery_py import Server",
    "import msgspec": "import msgspec",
}


def importing(_url: str, count: int) -> Figures:
    """Measure the CPU of fresh processes, one of each in turns; imports without Python's own."""

    def seconds(program: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    for program in IMPORTS.values():
        seconds(program)  # writes the bytecode
    taken = [{name: seconds(program) for name, program in IMPORTS.items()} for _ in range(count)]
    medians = {name: 1000 * statistics.median(one[name] for one in taken) for name in IMPORTS}
    python = medians["python"]
    return {name: value - (name != "python") * python for name, value in medians.items()}


def send_one(url: str, count: int) -> Figures:
    server = make_server(url)
    task = server.get_registered_task("noop")
    task.send(0)
    seconds = raw_seconds = 0.0
    with contextlib.ExitStack() as stack:
        raw: RawSender | raw_mongo.RawSender | None = None
        if is_sqlite(url):
            raw = stack.enter_context(RawSender(beside(url)))
        elif is_mongodb(url):
            raw = stack.enter_context(raw_mongo.RawSender(url))
        for block in range(BLOCKS):
            began = time.perf_counter()
            for number in range(block * count // BLOCKS, (block + 1) * count // BLOCKS):
                task.send(number)
            seconds += time.perf_counter() - began
            if raw is not None:
                raw_seconds += raw.send(count // BLOCKS)
    _check_waiting(server, count + 1)
    figures = {"send": count / seconds}
    if raw is not None:
        figures["pymongo send" if is_mongodb(url) else "raw send"] = (
            count // BLOCKS * BLOCKS / raw_seconds
        )
    return figures


def send_bulk(url: str, count: int) -> Figures:
    from machinery_py import group

    server = make_server(url)
    task = server.get_registered_task("noop")
    task.send(0)
    began = time.perf_counter()
    group(task.signature(number) for number in range(count)).send()
    seconds = time.perf_counter() - began
    _check_waiting(server, count + 1)
    return {"send in bulk": count / seconds}


def publish(url: str, count: int) -> Figures:
    """Publish messages without states, then the same ones with pika.

    Both wait until all are confirmed.
    """
    from benchmarks.peers.raw_amqp.line import Line
    from machinery_py.brokers.base import Message

    server = make_server(url)
    line = Line(parts(url)[0])
    body = (
        b'{"UUID":"task_0","Name":"noop","Args":[{"Type":"int64","Value":1}],'
        b'"RoutingKey":"machinery_tasks"}'
    )
    uuids = [f"task_{number:036d}" for number in range(count)]
    server.broker.put(
        [Message(uuid="task", name="noop", queue="machinery_tasks", body=body)], token=""
    )
    seconds = raw_seconds = 0.0
    for start in range(0, count, BULK):
        part = uuids[start : start + BULK]
        began = time.perf_counter()
        server.broker.put(
            [Message(uuid=uuid, name="noop", queue="machinery_tasks", body=body) for uuid in part],
            token="",
        )
        middle = time.perf_counter()
        line.publish([(uuid, body) for uuid in part])
        seconds += middle - began
        raw_seconds += time.perf_counter() - middle
    _check_waiting(server, count + 1)
    return {"publish": count / seconds, "raw publish": count / raw_seconds}


def _check_waiting(server: Any, count: int) -> None:
    waiting = sum(stats.waiting for stats in server.broker.stats())
    if waiting != count:
        raise Wrong(f"{waiting:,} messages wait, not {count:,}")


def drain(url: str, count: int) -> Figures:
    server = make_server(url)
    uuids = fill(server, count)
    [run] = work_off_by(server, url, count, workers=1)
    check_all_succeeded(server, uuids)
    rounds = run["claims"] + run["settlements"]
    figures = {
        "drain": count / (run["ended"] - run["began"]),
        "cpu per task": 1e6 * run["cpu"] / count,
        "commits": 1000 * rounds / count,
    }
    if is_sqlite(url):
        figures["raw drain"] = drain_raw(
            beside(url), count, batch=max(1, round(2 * count / rounds))
        )
    elif is_mongodb(url):
        figures["pymongo drain"] = raw_mongo.drain_raw(
            url,
            count,
            claim=max(1, round(count / run["claims"])),
            settle=max(1, round(count / run["settlements"])),
        )
    return figures


def drain_events(url: str, count: int) -> Figures:
    """Drain with the worker's events off and on, in turns; the best of each."""
    best: dict[str, tuple[float, float]] = {}
    for name in ("without", "with") * TURNS:
        server = make_server(url)
        uuids = fill(server, count)
        if name == "with":
            os.environ["MACHINERY_EVENTS"] = "true"  # for the worker's process
            server.events.enable()  # for a worker in this one
        [run] = work_off_by(server, url, count, workers=1)
        os.environ.pop("MACHINERY_EVENTS", None)
        server.events.disable()
        check_all_succeeded(server, uuids)
        server.close()
        speed, used = count / (run["ended"] - run["began"]), 1e6 * run["cpu"] / count
        before = best.get(name, (0.0, used))
        best[name] = max(speed, before[0]), min(used, before[1])
    (without, cpu_without), (watched, cpu_watched) = best["without"], best["with"]
    return {
        "drain without events": without,
        "drain with events": watched,
        "cpu without events": cpu_without,
        "cpu with events": cpu_watched,
    }


def drain_two(url: str, count: int) -> Figures:
    server = make_server(url)
    uuids = fill(server, count)
    runs = work_off_by(server, url, count, workers=2)
    check_all_succeeded(server, uuids)
    seconds = max(run["ended"] for run in runs) - min(run["began"] for run in runs)
    return {"drain by two": count / seconds}


def drain_logged(url: str, count: int) -> Figures:
    rate, cost = _compared(url, count, "helper_logged")
    return {"drain logged": rate, "cost of the log": cost}


def drain_metrics(url: str, count: int) -> Figures:
    rate, cost = _compared(url, count, "helper_metrics")
    return {"drain with metrics": rate, "cost of metrics": cost}


def _compared(url: str, count: int, helper: str) -> tuple[float, float]:
    """Drain by this helper and by the plain one, in turn, since the machine has its moods.

    Returns its tasks a second, and how much more CPU it used, in percent.
    """
    server = make_server(url)
    used: dict[str, list[float]] = {helper: [], "helper_drain": []}
    rates: list[float] = []
    for by in (*used, *reversed(used)):
        uuids = fill(server, count)
        [run] = work_off_by(server, url, count, workers=1, by=by)
        check_all_succeeded(server, uuids)
        used[by].append(run["cpu"])
        if by == helper:
            rates.append(count / (run["ended"] - run["began"]))
    more, plain = (statistics.median(one) for one in used.values())
    return statistics.median(rates), 100.0 * (more / plain - 1.0)


def latency(url: str, count: int) -> Figures:
    server = make_server(url)
    task = server.get_registered_task("noop")
    taken: list[float] = []
    with idle_worker(server, url):
        for number in range(count):
            began = time.perf_counter()
            if task.send(number).get(timeout=WAIT) != number:
                raise Wrong("a wrong result")
            taken.append(1000 * (time.perf_counter() - began))
    taken.sort()
    check_queues_empty(server)
    return {"latency": statistics.median(taken), "latency p99": taken[int(len(taken) * 0.99)]}


def steps(url: str, count: int) -> Figures:
    """Make steps in tasks of 20 each, on an idle store: what keeping costs, in the task."""
    server = make_server(url)
    taken: list[float] = []

    def flow() -> int:
        from machinery_py import current_task

        task = current_task()
        for number in range(20):
            began = time.perf_counter()
            task.step("noop", _noop_step, number)
            taken.append(1000 * (time.perf_counter() - began))
        return 20

    task = server.register_task("flow", flow)
    with server.new_worker("bench", 1):
        for _ in range(max(1, count // 20)):
            if task.send().get(timeout=WAIT) != 20:
                raise Wrong("a wrong result")
    taken.sort()
    check_queues_empty(server)
    return {"step": statistics.median(taken), "step p99": taken[int(len(taken) * 0.99)]}


def _noop_step(number: int) -> int:
    return number


def _timed_workflow(url: str, make: Callable[[Any], Any], expected: int) -> float:
    server = make_server(url)
    with idle_worker(server, url):
        began = time.perf_counter()
        found = server.send(make(server)).get(timeout=WAIT)
        seconds = time.perf_counter() - began
    if found != expected:
        raise Wrong(f"the result is {found}, not {expected}")
    check_queues_empty(server)
    return seconds


def _chain(url: str, count: int) -> float:
    def make(server: Any) -> Any:
        from machinery_py import chain

        task = server.get_registered_task("increase")
        return chain(task.signature(0), *(task.partial() for _ in range(count - 1)))

    return _timed_workflow(url, make, count)


def _chord(url: str, count: int) -> float:
    def make(server: Any) -> Any:
        from machinery_py import chord, group

        task = server.get_registered_task("noop")
        members = group(task.signature(number) for number in range(count))
        return chord(members, server.get_registered_task("total").partial(), collect=True)

    return _timed_workflow(url, make, sum(range(count)))


def chain(url: str, count: int) -> Figures:
    return {"chain": _chain(url, count)}


def long_chain(url: str, count: int) -> Figures:
    return {"long chain": _chain(url, count)}


def chord(url: str, count: int) -> Figures:
    return {"chord": _chord(url, count)}


def large_chord(url: str, count: int) -> Figures:
    return {"large chord": _chord(url, count)}


def delayed(url: str, count: int) -> Figures:
    server = make_server(url)
    server.broker.declare(
        [server.config.default_queue]
    )  # on RabbitMQ, delays need a hundred declarations once
    # Long enough to send them all; what counts begins when they are due.
    due_at = server.now() + timedelta(seconds=1.0 + count / 5000)
    uuids = fill(server, count, eta=due_at)
    if server.now() >= due_at:
        raise Wrong("sending took longer than the delay")
    with idle_worker(server, url):
        for start in range(0, count, BULK):
            _wait_for(server, uuids[start : start + BULK])
        finished = max(state.finished_at for state in server.backend.get_states(uuids).values())
    check_all_succeeded(server, uuids)
    return {"delayed": (finished - due_at).total_seconds()}


def _wait_for(server: Any, uuids: Sequence[str]) -> None:
    deadline = time.monotonic() + WAIT
    waiting = list(uuids)
    while waiting:
        states = server.backend.get_states(waiting)
        waiting = [uuid for uuid in waiting if not states[uuid].is_finished]
        if time.monotonic() > deadline:
            raise Wrong(f"{len(waiting):,} tasks are not finished")
        time.sleep(0.02)


def idle(url: str, count: int) -> Figures:
    """Measure this process, which is the worker."""
    server = make_server(url)
    with server.new_worker("bench", THREADS):
        server.get_registered_task("noop").send(0).get(timeout=WAIT)
        time.sleep(0.2)
        began, before = time.perf_counter(), cpu()
        time.sleep(count)
        used = (cpu() - before) / (time.perf_counter() - began)
        pss = next(
            line
            for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        )
    return {"memory": int(pss.split()[1]) / 1024, "idle cpu": 100 * used}


def starting(url: str, count: int) -> Figures:
    """Measure `machinery worker` from its start to "Ready"."""
    application = Path(__file__).with_name("application.py")
    command = [
        sys.executable,
        "-m",
        "machinery_py",
        "worker",
        application.stem,
        "--app-dir",
        str(application.parent),
    ]
    broker, results = parts(url)
    variables = {"MACHINERY_BROKER": broker, "MACHINERY_RESULT_BACKEND": results}
    taken: list[float] = []
    for _number in range(count + 1):
        began = time.perf_counter()
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **{name: value for name, value in variables.items() if value}},
        )
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")
        if not any(text.startswith("Ready") for text in lines):
            raise Wrong("the worker was never ready")
        taken.append(time.perf_counter() - began)
        child.terminate()
        child.communicate()
    return {"ready": statistics.median(taken[1:])}  # the first one writes the bytecode


COMMANDS: dict[str, Callable[[str, int], Figures]] = {
    function.__name__: function
    for function in (
        importing,
        send_one,
        send_bulk,
        publish,
        drain,
        drain_events,
        drain_two,
        drain_logged,
        drain_metrics,
        latency,
        chain,
        long_chain,
        chord,
        large_chord,
        delayed,
        huge_chord,
        burst,
        limited,
        steps,
        idle,
        starting,
        helper_alone,
        helper_drain,
        helper_logged,
        helper_metrics,
        helper_serve,
        helper_limited,
    )
}


def main(arguments: Sequence[str]) -> None:
    name, url, size = arguments
    print(json.dumps(COMMANDS[name](url, int(size))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
