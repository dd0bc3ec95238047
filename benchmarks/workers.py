"""Measured workers: in this process, or in others by `python -m benchmarks.measure helper_…`."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.workload import WAIT, Figures, Wrong, cpu, is_shared, make_server

THREADS = 4  # of each worker
QUIET = 0.3  # seconds without a task until the queue is looked at
POLL = 0.002  # seconds between two looks at a counter


class Counting:
    """Counter of successful claims and of settlements of a server's sessions."""

    def __init__(self, server: Any) -> None:
        self.claims = 0
        self.settlements = 0
        store = (
            server.app if hasattr(server, "app") else server.engine
        ).store  # as a revision has it
        open_session = store.open_session

        def opened(*args: Any, **kwargs: Any) -> Any:
            session = open_session(*args, **kwargs)
            receive, settle = session.receive, session.settle

            def counted_receive(*args: Any) -> Any:
                deliveries = receive(*args)
                self.claims += bool(deliveries)
                return deliveries

            def counted_settle(*args: Any) -> Any:
                self.settlements += 1
                return settle(*args)

            session.receive, session.settle = counted_receive, counted_settle
            return session

        store.open_session = opened


def work_off(server: Any, count: int, *, quiet: float = QUIET) -> Figures:
    """Run a worker here until `count` tasks are done, by it or others.

    The queues are looked at after so many seconds without a task; `math.inf` if it works alone.

    Returns its start and end (monotonic).
    """
    counting = Counting(server)
    before = cpu()
    began = time.monotonic()
    worker = server.new_worker("bench", THREADS)
    worker.start()
    pause = threading.Event()
    processed, ended, looked = 0, began, began
    is_empty = False
    while processed < count:
        pause.wait(POLL)
        now = time.monotonic()
        if worker.processed != processed:
            processed, ended, is_empty = worker.processed, now, False
        elif now - began > WAIT:
            break
        elif now - max(ended, looked) > quiet:
            looked = now
            if is_empty:
                break  # another process has done the rest
            # At the second look: what was settled while we looked is not counted yet.
            is_empty = not any(stats.waiting or stats.running for stats in server.broker.stats())
    used = cpu() - before
    worker.stop()
    return {
        "began": began,
        "ended": ended,
        "processed": processed,
        "cpu": used,
        "claims": counting.claims,
        "settlements": counting.settlements,
    }


@contextlib.contextmanager
def helper(name: str, url: str, count: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Start another process of this file.

    It prints "ready", and begins when its standard input has a line.
    """
    command = [sys.executable, "-m", "benchmarks.measure", name, url, str(count)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = said(child)
        if line != "ready":
            raise Wrong(f"the worker process said {line!r}")
        yield child
    finally:
        if child.poll() is None and child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
            try:
                child.wait(10.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def helper_drain(
    url: str, count: int, prepare: Callable[[Any], object] = id, quiet: float = QUIET
) -> Figures:
    """Process that runs the tasks of `drain`."""
    server = make_server(url)
    prepare(server)
    server.broker.stats()  # opens the store
    print("ready", flush=True)
    sys.stdin.readline()
    return work_off(server, count, quiet=quiet)


def helper_alone(url: str, count: int) -> Figures:
    """The same, where a look at ten thousand queues would cost more than the tasks."""
    return helper_drain(url, count, quiet=math.inf)


def helper_logged(url: str, count: int) -> Figures:
    """The same, with a log as the command line writes it, to a file."""
    from machinery_py.cli import logs

    with tempfile.TemporaryFile("w", buffering=1) as sys.stderr:
        logs.configure("info", "text")
        return helper_drain(url, count)


def helper_metrics(url: str, count: int) -> Figures:
    """The same, and it counts as below `machinery worker --health-port`."""
    from machinery_py.cli.metrics import ProcessCounts, install

    with ProcessCounts():
        return helper_drain(url, count, install)


def helper_serve(url: str, _count: int) -> Figures:
    """Run a worker until standard input ends."""
    server = make_server(url)
    with server.new_worker("bench", THREADS):
        print("ready", flush=True)
        sys.stdin.readline()
    return {}


@contextlib.contextmanager
def idle_worker(server: Any, url: str) -> Iterator[None]:
    """Start a worker that is idle."""
    with contextlib.ExitStack() as stack:
        if is_shared(url):
            stack.enter_context(helper("helper_serve", url))
        else:
            stack.enter_context(server.new_worker("bench", THREADS))
        # The first task makes threads, connections and caches.
        server.get_registered_task("noop").send(0).get(timeout=WAIT)
        yield


def work_off_by(
    server: Any, url: str, count: int, *, workers: int, by: str = "helper_drain"
) -> list[Figures]:
    if not is_shared(url):
        runs = [work_off(server, count)]
    else:
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(helper(by, url, count)) for _ in range(workers)]
            for child in children:
                go(child)
            runs = [json.loads(said(child)) for child in children]
    processed = sum(run["processed"] for run in runs)
    if processed != count:
        raise Wrong(f"{processed:,.0f} tasks were processed, not {count:,}")
    return runs
