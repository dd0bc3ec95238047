"""Shared parts of the measurements: the application, its full queue, and the check of results."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Nothing of the library is imported at the top: what is imported then is part of what is measured.

WAIT = 240.0  # seconds for any result
SETTLING = 10.0  # seconds from the last result to its acknowledgement, at most
BULK = 5000  # tasks submitted in one step where sending is not what is measured

Figures = dict[str, float]


class Wrong(Exception):
    """A measured run was wrong, so its speed is not reported."""


def make_server(url: str) -> Any:
    """Return a Server with the measured tasks."""
    import machinery_py

    tree = os.environ.get("MACHINERY_BENCH_TREE", "")
    if tree and not Path(machinery_py.__file__).resolve().is_relative_to(Path(tree).resolve()):
        raise Wrong(f"machinery_py is from {machinery_py.__file__}, not from {tree}")
    broker, results = parts(url)
    server = (
        machinery_py.Server(broker=broker, result_backend=results)
        if results
        else machinery_py.Server(url)
    )

    @server.task
    def noop(number: int) -> int:
        return number

    @server.task
    def waits(number: int) -> object:
        return machinery_py.current_task().wait_for("go")

    @server.task
    def increase(number: int) -> int:
        return number + 1

    @server.task
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    return server


def parts(url: str) -> tuple[str, str]:
    """The URLs of the broker and of the results, which are "" if they are where the broker is."""
    broker, plus, results = url.partition("+redis://")
    return broker, plus[1:] + results


def is_sqlite(url: str) -> bool:
    return url.startswith("sqlite:")


def is_mongodb(url: str) -> bool:
    return url.startswith("mongodb:")


def beside(url: str) -> str:
    """A file for the raw measurement, on the same disk."""
    return url.removeprefix("sqlite:///").partition("?")[0] + ".raw"


def is_shared(url: str) -> bool:
    return not url.startswith("memory:")


def fill(server: Any, count: int, **options: Any) -> list[str]:
    """Send no-op tasks in large steps; their UUIDs."""
    from machinery_py import group

    task = server.get_registered_task("noop")
    uuids: list[str] = []
    for start in range(0, count, BULK):
        bound = task.options(**options) if options else task
        members = group(
            bound.signature(number) for number in range(start, min(count, start + BULK))
        )
        uuids.extend(one.uuid for one in server.send_group(members).results)
    return uuids


def check_all_succeeded(server: Any, uuids: Sequence[str]) -> None:
    states = server.backend.get_states(list(uuids))
    succeeded = sum(state.state.value == "SUCCESS" for state in states.values())
    if succeeded != len(uuids):
        raise Wrong(f"{succeeded:,} of {len(uuids):,} tasks have SUCCESS")
    check_queues_empty(server)


def check_queues_empty(server: Any) -> None:
    # One store commits the last settlement before its result can be seen. Two stores acknowledge
    # after that.
    deadline = time.monotonic() + (
        0.0 if server.config.result_backend in ("", server.config.broker) else SETTLING
    )
    while left := [
        stats
        for stats in server.broker.stats()
        if stats.waiting or stats.running or stats.delayed or stats.dead
    ]:
        if time.monotonic() >= deadline:
            raise Wrong(f"queue {left[0].queue!r} is not empty: {left[0]}")
        time.sleep(0.1)


def cpu() -> float:
    """Seconds of CPU that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
