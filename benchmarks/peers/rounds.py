"""One round of one system: send, drain by one process, send in bulk, drain by two, latency.

At the end a chain and a chord, where the system has them.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benchmarks.peers.hosts import Host
from benchmarks.peers.processes import HANG, RoundFailed, Workers, ask, workers
from benchmarks.peers.systems import System

LATENCY_CALLS = 300
STARTED = (
    0.1  # of the tasks are done when the clock starts: until then workers connect, fork, warm up
)
LOOKS = 20  # that show what a look costs
CHAIN, CHORD = 100, 1000  # tasks

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What had been used at a moment of a drain."""

    at: float
    done: int
    looks: int
    cpu: float
    server: Mapping[str, float]


class Bench:
    """Rounds on servers that all systems share."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.file = folder / "ids.json"
        self._pause = threading.Event()

    def round(self, system: System, count: int, *, calls: int = LATENCY_CALLS) -> Figures:
        """Raises RoundFailed when anything was not right."""
        figures: Figures = {}
        for processes in (1, 2):
            self.clear(system)
            action = "bulk" if processes == 2 and system.bulk else "one"
            sent = self._send(system, action, count)
            if processes == 1 or system.bulk:
                figures |= sent
            left = system.left(self.host.probe)
            if left != count:
                raise RoundFailed(
                    f"{system.name}: {left:,} messages wait after sending, not {count:,}"
                )
            figures |= self._drain(system, count, processes)
            checked = ask(system, self.host.servers, "check", count, self.file)
            if checked != {"wrong": 0, "checked": count}:
                raise RoundFailed(f"{system.name}: results: {checked}")
        self.clear(system)
        with workers(system, self.host.servers, 1, latency=True):
            taken = sorted(
                cast(
                    "list[float]",
                    ask(system, self.host.servers, "latency", calls, self.file)["seconds"],
                )
            )
            if system.workflows:
                # No larger than the round itself, which may be a short one.
                for action, size in (("chain", CHAIN), ("chord", min(CHORD, count))):
                    answer = ask(system, self.host.servers, action, size, self.file)
                    figures[action] = float(answer["seconds"])
        figures["latency"] = 1000 * statistics.median(taken)
        figures["p99"] = 1000 * taken[math.ceil(len(taken) * 0.99) - 1]
        return figures

    def _send(self, system: System, action: str, count: int) -> Figures:
        before, kept = self.host.counters(), self.host.kept_bytes()
        rate = float(ask(system, self.host.servers, action, count, self.file)["rate"])
        after = self.host.counters()
        kind = "send" if action == "one" else "bulk"
        figures = {kind: rate}
        for name in self.host.OF_SENDING[kind]:
            figures[f"{kind} {name}"] = (after[name] - before[name]) / count
        if kind == "send" and kept is not None:
            figures["bytes"] = ((self.host.kept_bytes() or 0.0) - kept) / count
        return figures

    def clear(self, system: System) -> None:
        """Empty the servers, and make the tables of the system."""
        self._done = self._looks = 0
        self.host.clear()
        if system.tables:
            ask(system, self.host.servers, "tables", 0, self.file)

    def _drain(self, system: System, count: int, processes: int) -> Figures:
        look = self._cost_of_a_look(system, count)
        with workers(system, self.host.servers, processes) as running:
            start = self._mark(running, time.monotonic(), done=0)
            began = self._mark(running, self._wait(running, count, math.ceil(count * STARTED)))
            if began.done > count / 2:
                began = (
                    start  # too few tasks to leave the start out: most were done between two looks
                )
            ended = self._mark(running, self._wait(running, count, count))
            self._wait_acknowledged(running)
        done, looks, seconds = count - began.done, ended.looks - began.looks, ended.at - began.at
        if processes == 2:
            return {"drain by two": done / seconds}
        figures = {"drain": done / seconds, "cpu": 1e6 * (ended.cpu - began.cpu) / done}
        for name, cost in look.items():
            figures[name] = (ended.server[name] - began.server[name] - looks * cost) / done
        return figures

    _done = 0
    _looks = 0

    def _mark(self, running: Workers, at: float, done: int | None = None) -> Mark:
        return Mark(
            at=at,
            done=self._done if done is None else done,
            looks=self._looks,
            cpu=running.cpu(),
            server=self.host.counters(),
        )

    def _wait(self, running: Workers, count: int, wanted: int) -> float:
        """Look until so many are done; the moment at which it was seen."""
        deadline = time.monotonic() + HANG
        while True:
            self._done = running.system.done(self.host.probe, count)
            self._looks += 1
            now = time.monotonic()
            if self._done >= wanted:
                return now
            running.check_alive()
            if now > deadline:
                raise RoundFailed(
                    f"{running.system.name}: {self._done:,} of {count:,} done in {HANG:g} s: "
                    f"{running.log_tail()}"
                )
            self._pause.wait(self.host.POLL)

    def wait_done(self, running: Workers, count: int) -> None:
        self._wait(running, count, count)
        self._wait_acknowledged(running)

    def _wait_acknowledged(self, running: Workers) -> None:
        deadline = time.monotonic() + 10.0
        while left := running.system.left(self.host.probe):
            if time.monotonic() > deadline:
                raise RoundFailed(
                    f"{running.system.name}: {left:,} messages are left after all have a result"
                )
            self._pause.wait(self.host.POLL)

    def _cost_of_a_look(self, system: System, count: int) -> Mapping[str, float]:
        before = self.host.counters()
        for _ in range(LOOKS):
            system.done(self.host.probe, count)
        after = self.host.counters()
        return {name: (after[name] - before[name]) / LOOKS for name in after}
