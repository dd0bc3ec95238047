"""Profile of a worker's processor time per task.

    python -m benchmarks.profile [--url URL] [--tasks N]

A thread samples the stacks of the worker's threads every INTERVAL. It charges the CPU time that
each thread used since the last sample (by the thread's own clock) to the line where the thread is
now. So a waiting thread costs nothing, and one that computes in SQLite or msgspec is charged at the
Python line that called. Trust only large figures. Work that ends between two samples is charged to
the line where its thread waits for more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from benchmarks.children import own_store
from benchmarks.workload import WAIT, check_all_succeeded, fill, make_server

INTERVAL = 0.0005  # seconds between two looks
ROLES = ("receiver", "settler", "maintenance")
TASKS = 20_000
THREADS = 4
NAME = "bench"
CONNECTION = "machinery-amqp-"  # the threads of connections to RabbitMQ

Place = tuple[str, str, int]  # file, function, line


class Sampler:
    """Profiler that counts CPU time by role, function and line until it is stopped."""

    def __init__(self) -> None:
        self.roles: Counter[str] = Counter()
        self.own: dict[str, Counter[Place]] = {}
        self.total: dict[str, Counter[Place]] = {}
        self.samples = 0
        self._last: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(INTERVAL):
            frames = sys._current_frames()
            for thread in threading.enumerate():
                if thread.ident is None or not thread.name.startswith((f"{NAME}-", CONNECTION)):
                    continue
                try:
                    used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                except OSError:  # it has ended
                    continue
                spent = used - self._last.get(thread.ident, used)
                self._last[thread.ident] = used
                frame = frames.get(thread.ident)
                if spent > 0 and frame is not None:
                    self._charge(role_of(thread.name), frame, spent)
            self.samples += 1

    def _charge(self, role: str, frame: FrameType, spent: float) -> None:
        self.roles[role] += spent  # type: ignore[assignment]  # a Counter of seconds
        own, total = self.own.setdefault(role, Counter()), self.total.setdefault(role, Counter())
        code = frame.f_code
        own[code.co_filename, code.co_qualname, frame.f_lineno] += spent  # type: ignore[assignment]
        seen: set[Place] = set()
        at: FrameType | None = frame
        while at is not None:
            place = (at.f_code.co_filename, at.f_code.co_qualname, at.f_code.co_firstlineno)
            if place not in seen:
                seen.add(place)
                total[place] += spent  # type: ignore[assignment]
            at = at.f_back


def role_of(name: str) -> str:
    last = name.rpartition("-")[2]
    if name.startswith(CONNECTION):
        return f"connection: {last}"
    return last if last in ROLES else "executors"


def short(path: str) -> str:
    parts = Path(path).parts
    return (
        "/".join(parts[parts.index("machinery_py") + 1 :])
        if "machinery_py" in parts
        else Path(path).name
    )


def show(title: str, counter: Counter[Place], tasks: int, limit: int) -> None:
    print(f"    {title}")
    for (file, function, number), seconds in counter.most_common(limit):
        print(f"      {1e6 * seconds / tasks:6.2f} µs  {short(file)}:{number}  {function}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile", description="Where a task's time goes in a worker."
    )
    parser.add_argument("--url", default="sqlite:///bench.db")
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--lines", type=int, default=14, help="shown of each list")
    options = parser.parse_args()
    sys.setswitchinterval(INTERVAL)  # or the sampler would have to wait for its turn
    with own_store(options.url, Path(tempfile.gettempdir())) as url:
        server = make_server(url)
        uuids = fill(server, options.tasks)
        worker = server.new_worker(NAME, THREADS)
        pause = threading.Event()
        with Sampler() as sampler:
            began = time.perf_counter()
            worker.start()
            while worker.processed < options.tasks and time.perf_counter() - began < WAIT:
                pause.wait(0.01)
            seconds = time.perf_counter() - began
        worker.stop()
        check_all_succeeded(server, uuids)
        server.close()
    tasks = options.tasks
    print(
        f"{tasks:,} no-op tasks in {seconds:.2f} s ({tasks / seconds:,.0f}/s while watched), "
        f"{sampler.samples:,} looks; "
        f"CPU for each task: {1e6 * sum(sampler.roles.values()) / tasks:.1f} µs"
    )
    for role, used in sampler.roles.most_common():
        print(f"\n  {role}: {1e6 * used / tasks:.1f} µs")
        show("lines, alone", sampler.own[role], tasks, options.lines)
        show("functions, with what they call", sampler.total[role], tasks, options.lines)


if __name__ == "__main__":
    main()
