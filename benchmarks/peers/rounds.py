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

from redis.exceptions import ResponseError

from benchmarks.peers.processes import HANG, TICKS, RoundFailed, Workers, ask, workers
from benchmarks.peers.systems import Probe, System
from tests.support.servers import RabbitMQServer, RedisServer

LATENCY_CALLS = 300
POLL = 0.01  # seconds between two looks at a queue
STARTED = (
    0.1  # of the tasks are done when the clock starts: until then workers connect, fork, warm up
)
LOOKS = 20  # that show what a look costs
CHAIN, CHORD = 100, 1000  # tasks
SCRIPTS = ("cmdstat_eval", "cmdstat_evalsha", "cmdstat_fcall")

VHOST = """rabbit_vhost:delete(<<"{before}">>, <<"bench">>),
    rabbit_vhost:add(<<"{name}">>, <<"bench">>),
    rabbit_auth_backend_internal:set_permissions(
    <<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"bench">>)."""

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
    """The server that all share, and its counters.

    With `rabbit`, RabbitMQ has the messages and Redis the results.
    """

    def __init__(
        self, redis: RedisServer, folder: Path, rabbit: RabbitMQServer | None = None
    ) -> None:
        self.redis = redis
        self.rabbit = rabbit
        self.url = redis.url.rpartition("/")[0]
        self.probe = Probe(self.url, rabbit)
        self._vhosts = 0
        self.file = folder / "ids.json"
        self._pause = threading.Event()

    def round(self, system: System, count: int, *, calls: int = LATENCY_CALLS) -> Figures:
        """Raises RoundFailed when anything was not right."""
        figures: Figures = {}
        for processes in (1, 2):
            self.clear()
            action = "bulk" if processes == 2 and system.bulk else "one"
            sent = self._send(system, action, count)
            if processes == 1 or system.bulk:
                figures |= sent
            left = system.left(self.probe)
            if left != count:
                raise RoundFailed(
                    f"{system.name}: {left:,} messages wait after sending, not {count:,}"
                )
            figures |= self._drain(system, count, processes)
            checked = ask(system, self.servers, "check", count, self.file)
            if checked != {"wrong": 0, "checked": count}:
                raise RoundFailed(f"{system.name}: results: {checked}")
        self.clear()
        with workers(system, self.servers, 1, latency=True):
            taken = sorted(
                cast(
                    "list[float]",
                    ask(system, self.servers, "latency", calls, self.file)["seconds"],
                )
            )
            if system.workflows:
                # No larger than the round itself, which may be a short one.
                for action, size in (("chain", CHAIN), ("chord", min(CHORD, count))):
                    answer = ask(system, self.servers, action, size, self.file)
                    figures[action] = float(answer["seconds"])
        figures["latency"] = 1000 * statistics.median(taken)
        figures["p99"] = 1000 * taken[math.ceil(len(taken) * 0.99) - 1]
        return figures

    def _send(self, system: System, action: str, count: int) -> Figures:
        before, memory = self._server(), self._memory()
        rate = float(ask(system, self.servers, action, count, self.file)["rate"])
        after = self._server()
        used = {name: (after[name] - before[name]) / count for name in ("redis cpu", "scripts")}
        if action == "bulk":
            return {"bulk": rate, "bulk redis cpu": used["redis cpu"]}
        figures = {
            "send": rate,
            "send redis cpu": used["redis cpu"],
            "send scripts": used["scripts"],
        }
        if self.rabbit is None:
            figures["bytes"] = (self._memory() - memory) / count
        return figures

    def _memory(self) -> float:
        """Return the bytes that Redis uses for keys."""
        facts = {**self.probe.ask("INFO", "server"), **self.probe.ask("INFO", "memory")}
        version = tuple(map(int, facts["redis_version"].split(".")[:2]))
        # Redis counts the heap of its scripts since 7.4, and a collection makes that smaller.
        heap = facts["used_memory_vm_total"] if version >= (7, 4) else 0
        return float(
            facts["used_memory"] - facts["mem_clients_normal"] - facts["mem_aof_buffer"] - heap
        )

    @property
    def servers(self) -> dict[str, str]:
        """Where they are, for the scripts."""
        found = {"PEERS_URL": self.url, "MACHINERY_URL": f"{self.url}/0"}
        if self.rabbit is not None:
            amqp = f"{self.rabbit.url}{self.probe.vhost}"
            found |= {"PEERS_AMQP": amqp, "MACHINERY_BROKER": amqp}
        return found

    def _drain(self, system: System, count: int, processes: int) -> Figures:
        look = self._cost_of_a_look(system, count)
        with workers(system, self.servers, processes) as running:
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
            server=self._server(),
        )

    def _wait(self, running: Workers, count: int, wanted: int) -> float:
        """Look until so many are done; the moment at which it was seen."""
        deadline = time.monotonic() + HANG
        while True:
            self._done = running.system.done(self.probe, count)
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
            self._pause.wait(POLL)

    def wait_done(self, running: Workers, count: int) -> None:
        self._wait(running, count, count)
        self._wait_acknowledged(running)

    def _wait_acknowledged(self, running: Workers) -> None:
        deadline = time.monotonic() + 10.0
        while left := running.system.left(self.probe):
            if time.monotonic() > deadline:
                raise RoundFailed(
                    f"{running.system.name}: {left:,} messages are left after all have a result"
                )
            self._pause.wait(POLL)

    def _cost_of_a_look(self, system: System, count: int) -> Mapping[str, float]:
        before = self._server()
        for _ in range(LOOKS):
            system.done(self.probe, count)
        after = self._server()
        return {name: (after[name] - before[name]) / LOOKS for name in after}

    def _server(self) -> dict[str, float]:
        """Return counters of Redis: commands, also in scripts; socket reads; its CPU in µs.

        `scripts` is the time in µs that scripts took, with the commands that they call.
        """
        counts = self.probe.ask("INFO", "commandstats")
        rabbit = {} if self.rabbit is None else {"rabbitmq cpu": 1e6 * _cpu(self.rabbit.pid)}
        commands = sum(
            line["calls"] for name, line in counts.items() if not name.startswith("cmdstat_info")
        )
        facts = {**self.probe.ask("INFO", "stats"), **self.probe.ask("INFO", "cpu")}
        return {
            "commands": commands,
            "scripts": float(sum(counts[name]["usec"] for name in SCRIPTS if name in counts)),
            "reads": facts["total_reads_processed"],
            "redis cpu": 1e6 * (facts["used_cpu_sys"] + facts["used_cpu_user"]),
            **rabbit,
        }

    def clear(self) -> None:
        """An empty server, with an empty file behind it."""
        self.probe.ask("FLUSHALL")
        if self.rabbit is not None:
            self._new_vhost(self.rabbit)
        self._done = self._looks = 0
        deadline = time.monotonic() + HANG
        while True:
            try:
                self.probe.ask("BGREWRITEAOF")
                break
            except ResponseError:  # one is being written
                if time.monotonic() > deadline:
                    raise
                self._pause.wait(POLL)
        while (facts := self.probe.ask("INFO", "persistence"))["aof_rewrite_in_progress"] or facts[
            "aof_rewrite_scheduled"
        ]:
            if time.monotonic() > deadline:
                raise RoundFailed("Redis still writes its file anew")
            self._pause.wait(POLL)

    def _new_vhost(self, rabbit: RabbitMQServer) -> None:
        """Make a new vhost: nothing of the last one is left, whatever queues the system has."""
        before, self._vhosts = self.probe.vhost, self._vhosts + 1
        self.probe.vhost = f"bench{self._vhosts}"
        rabbit.ctl("eval", VHOST.format(name=self.probe.vhost, before=before))


def _cpu(pid: int) -> float:
    """Seconds of CPU of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
